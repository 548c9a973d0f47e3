"""`EngineThread`: an engine on a thread of its own, one queue in and one call out.

Everything that touches the engine happens here; callers hand in sequences and get values back.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from rooflax.engine.compilation import CompileCounts, count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.runner import Compiled
from rooflax.engine.sequence import Sequence, StepOutput, with_siblings
from rooflax.errors import EngineError, QueueFull, RequestError, first_line

EXIT_S = 30.0
"""The most that the end of the process waits for the step at hand."""
Deliver = Callable[[list[StepOutput]], None]


class Health(NamedTuple):
    """Health of an engine's thread.

    Attributes:
        is_stopping: it takes no more requests.
        failure: why it ended, if it failed.
        num_open: sequences that run or wait.
        stalled_s: since the last step, while there is work; 0 without work.
    """

    is_stopping: bool
    failure: str | None
    num_open: int
    stalled_s: float


class EngineThread:
    """Warms an engine up, then runs it until it is stopped.

    Args:
        deliver: is called, on this thread, with what each step gave.
        report: is called, on this thread, with each program that warm-up compiled.
        max_waiting: sequences that may wait beyond those that run.

    Attributes:
        warm_up_report: the compiled programs, once warm.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        *,
        max_waiting: int,
        report: Callable[[Compiled], None] = lambda _: None,
    ):
        self.engine, self.warm_up_report = engine, []
        self._deliver, self._report = deliver, report
        self._most_open, self._num_open = max_waiting + engine.config.max_num_seqs, 0
        self._moved_s = 0.0  # when the last step ended, or work came where there was none
        self._inside: dict[int, Sequence] = {}  # the engine, until they have been answered
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping, self._drains = False, False
        self._failure: str | None = None
        self._is_warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rooflax-engine", daemon=True)
        self._thread.start()
        # A daemon thread that is inside XLA when the interpreter ends would abort the process.
        atexit.register(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop(drain=False)
        self.join(EXIT_S)

    def wait_until_warm(self) -> None:
        """Returns once everything is compiled.

        Raises:
            EngineError: that failed.
        """
        self._is_warm.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._is_stopping:
            raise EngineError("The engine is shutting down and takes no more requests.")

    def health(self) -> Health:
        """Health at this moment; any thread may ask."""
        with self._lock:
            stalled_s = time.perf_counter() - self._moved_s if self._num_open else 0.0
            return Health(self._is_stopping, self._failure, self._num_open, stalled_s)

    def submit(self, sequences: Seq[Sequence]) -> None:
        """Queues sequences, with all beams of their groups.

        Raises:
            QueueFull: too many wait already; none is queued.
            RequestError: one could not run even alone, or there are more than may ever wait; none
                is queued.
            EngineError: the engine is shutting down, or has failed.
        """
        self.engine.check(sequences)
        sequences = with_siblings(sequences)
        if len(sequences) > self._most_open:
            raise RequestError(
                f"The request has {len(sequences)} samples or beams, and at most "
                f"{self._most_open} may run and wait; lower n, or raise max_waiting.",
                param="n",
            )
        now = time.perf_counter()
        with self._lock:
            self._check_alive()
            if self._num_open + len(sequences) > self._most_open:
                raise QueueFull(
                    f"{self._num_open} sequences run or wait and {self._most_open} may; try again "
                    f"later."
                )
            if self._num_open == 0:
                self._moved_s = now
            self._num_open += len(sequences)
            self._inbox.put(lambda: self._add(sequences, now))

    def _add(self, sequences: list[Sequence], now_s: float) -> None:
        self._inside |= {id(sequence): sequence for sequence in sequences}
        self.engine.add(sequences, now_s, is_checked=True)

    def abort(self, sequences: Iterable[Sequence], reason: str = "abort") -> None:
        """Ends sequences, and the other beams of their groups, wherever they are; nothing is
        delivered for them any more.

        Args:
            reason: their finish_reason.
        """
        mine = list(sequences)
        self._inbox.put(lambda: self._abort(mine, reason))

    def _abort(self, sequences: list[Sequence], reason: str = "abort") -> None:
        open_ = [sequence for sequence in with_siblings(sequences) if not sequence.is_finished]
        for sequence in open_:
            self.engine.abort(sequence, reason)
        self._close(open_)

    def stop(self, *, drain: bool) -> None:
        """Takes no more requests, and ends when those at hand are done, or at once.

        Args:
            drain: let them finish; otherwise they end with finish_reason "abort".
        """
        self._drains = drain
        self._is_stopping = True
        self._inbox.put(lambda: None)  # wakes the thread

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread's end; whether it came."""
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            atexit.unregister(self._stop_at_exit)
        return ended

    def _close(self, sequences: Iterable[Sequence]) -> None:
        answered = [self._inside.pop(id(sequence), None) for sequence in sequences]
        with self._lock:
            self._num_open -= sum(sequence is not None for sequence in answered)

    def _run(self) -> None:
        try:
            self.warm_up_report = self.engine.warm_up_all(self._report)
        except BaseException as error:
            self._failure = f"Warming up failed: {first_line(error)}"
        self._is_warm.set()
        if self._failure is None:
            try:
                self._serve()
            except BaseException as error:  # a library's panic is no Exception
                self._failure = f"The engine's thread ended: {first_line(error)}"
        with self._lock:  # what was submitted before is in the inbox by now
            self._is_stopping = True
        self._receive_rest()
        self._end_all("abort" if self._failure is None else "error", self._failure)
        self.engine.end(self._failure)

    def _serve(self) -> None:
        compiled = CompileCounts()
        with count_compilations(compiled):
            while self._failure is None:
                try:
                    self._receive()
                except BaseException as error:
                    self._end_all("error", f"The engine failed at work: {first_line(error)}")
                if self._is_stopping and not (self._drains and self.engine.has_unfinished):
                    break
                self._step()
                self._moved_s = time.perf_counter()
                self.engine.metrics.num_compilations = compiled.requests

    def _receive(self) -> None:
        """Does what was asked for; waits for it where there is nothing else to do."""
        wait = not self.engine.has_unfinished and not self._is_stopping
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _receive_rest(self) -> None:
        """Receives the remaining requests at the end, so that each is answered."""
        while True:
            try:
                return self._receive()
            except BaseException as error:
                self._failure = self._failure or f"The engine's thread ended: {first_line(error)}"

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except BaseException as error:  # a library's panic is no Exception
            self._end_all("error", f"The engine failed at work: {first_line(error)}")
            return
        self._close(o.sequence for o in outputs if o.finish_reason is not None)
        self._deliver_each(outputs)

    def _deliver_each(self, outputs: list[StepOutput]) -> None:
        """All at once; if that fails, one by one, and whose delivery fails is aborted."""
        if not outputs:
            return
        try:
            self._deliver(outputs)
        except Exception:
            for output in outputs:
                try:
                    self._deliver([output])
                except Exception:
                    self._abort([output.sequence])

    def _end_all(self, reason: str, error: str | None) -> None:
        """Ends every sequence that has not been answered, also one that the engine has let go of;
        after an error the engine starts with an empty cache."""
        try:
            self.engine.forget_all()
            if error is not None:
                self.engine.reset()
        except Exception as another:
            error = self._failure = f"The engine could not start again: {first_line(another)}"
        lost = list(self._inside.values())
        for sequence in lost:
            sequence.finish(reason, error)
            self.engine.metrics.finished(sequence, time.perf_counter())
        self._close(lost)
        outputs = [sequence.output_since(sequence.num_output_tokens) for sequence in lost]
        self._deliver_each(outputs)
