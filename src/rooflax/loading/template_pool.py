"""A few processes that render chat templates, and the deadline that ends them.

Nothing of a template runs in this process. A worker that is late, or that ends by itself, is
killed, reaped and replaced by the next request; the others continue meanwhile. Limits of memory are
the worker's own (`template_worker`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooflax import processes
from rooflax.errors import EngineError
from rooflax.loading.frames import read_frame, write_frame

MAX_WORKERS = 4
SECONDS = 1.25
"""From a request to its answer; starting a worker is not counted.

By the clock, but a worker that has not had so much processor time because others had it, or
because all processes were stopped, may take up to MOST_SECONDS.
"""
MOST_SECONDS = 10 * SECONDS
START_SECONDS = 60.0
SHORTEST_WAIT = 0.02
"""Seconds between two looks at what a late worker has had."""

_MODULE = "rooflax.loading.template_worker"
# What an interpreter may need to start, and the zone of `strftime_now`.
_ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")


class WorkerEnded(Exception):
    """A worker ended, or had to be, before it answered; the message says why."""


def ask(request: Mapping[str, Any], max_answer: int) -> dict[str, Any]:
    """A worker's answer.

    Args:
        request: plain data.
        max_answer: bytes that an answer may have.

    Raises:
        WorkerEnded: there is none.
        EngineError: no worker could be started.
    """
    pool = _pools.setdefault(os.getpid(), _Pool())  # a forked process has workers of its own
    return pool.ask(json.dumps(request, ensure_ascii=False).encode(), max_answer)


class _Pool:
    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_WORKERS)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()

    def ask(self, data: bytes, max_answer: int) -> dict[str, Any]:
        with self._free:
            worker = self._take()
            deadline = time.monotonic() + SECONDS
            try:
                return self._ask(worker, data, max_answer, deadline)
            except WorkerEnded:
                # One that had answered before may have ended while it waited.
                if not worker.used or worker.late:
                    raise
            return self._ask(self._start(), data, max_answer, deadline)

    def _ask(
        self, worker: _Worker, data: bytes, max_answer: int, deadline: float
    ) -> dict[str, Any]:
        whole = False
        try:
            answer = json.loads(worker.ask(data, max_answer, deadline - time.monotonic()))
            whole = not worker.late and "last" not in answer
            return answer
        except ValueError:
            raise WorkerEnded("its process answers in no JSON") from None
        finally:
            # Whatever else happens, such as Ctrl-C, may leave half an answer in the pipe.
            if whole:
                with self._lock:
                    worker.used = True
                    self._idle.append(worker)
            else:
                self._discard(worker)

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
        try:
            worker.ask(None, 1000, START_SECONDS)
        except WorkerEnded as error:
            self._discard(worker)
            raise EngineError(
                f"The process that renders chat templates did not start ({error}); "
                f"`python -m {_MODULE}` must be able to run."
            ) from None
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.stop()

    def stop(self) -> None:
        with self._lock:
            workers, self._workers, self._idle = self._workers, set(), []
        for worker in workers:
            worker.stop()


class _Worker:
    """One process.

    Attributes:
        used: it has answered before.
        late: it was killed at a deadline.
    """

    def __init__(self) -> None:
        self.used = self.late = False
        # No preexec_fn: it would be Python code after a fork, next to the threads of JAX.
        self._process = processes.start(
            _MODULE,
            environment=_environment(),
            options=("-S",),
            lifeline=False,
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=processes.DEVNULL,
            start_new_session=True,
        )

    def ask(self, data: bytes | None, max_answer: int, seconds: float) -> bytes:
        """Sends a message, if there is one, and gives the next that comes back."""
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            raise WorkerEnded("it has no pipes")
        answered = threading.Event()
        watch = threading.Thread(target=self._watch, args=(answered, seconds), daemon=True)
        watch.start()
        try:
            if data is not None:
                write_frame(sink, data)
            return read_frame(source, max_answer)
        except ValueError:
            raise WorkerEnded("its answer is too long") from None
        except (EOFError, OSError):
            answered.set()
            watch.join()
            raise WorkerEnded(self._why()) from None
        finally:
            answered.set()
            watch.join()

    def _watch(self, answered: threading.Event, seconds: float) -> None:
        """Kills the process unless it answers in time."""
        pid, begin = self._process.pid, time.monotonic()
        used_before, left = _processor_seconds(pid), max(0.0, seconds)
        while not answered.wait(left):
            used = _processor_seconds(pid)
            own = seconds if used is None or used_before is None else used - used_before
            left = min(seconds - own, MOST_SECONDS - (time.monotonic() - begin))
            if left <= 0:
                self.late = True
                self._process.kill()
                return
            left = max(left, SHORTEST_WAIT)

    def _why(self) -> str:
        with contextlib.suppress(processes.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if self.late or (os.name == "posix" and code == -signal.SIGXCPU):
            return f"it does not finish within {SECONDS} seconds"
        if code is not None and code < 0:
            return f"its process ended by signal {-code}"
        return f"its process ended with status {code}"

    def stop(self) -> None:
        """Kills the process and reaps it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _processor_seconds(pid: int) -> float | None:
    """Processor time that a process has had; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
        return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _environment() -> dict[str, str]:
    """No variable of this process but a few; where rooflax and jinja2 lie, without site."""
    folders = [str(Path(__file__).resolve().parents[2])]
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).resolve().parents[1]))
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}


_pools: dict[int, _Pool] = {}


@atexit.register
def _stop() -> None:
    pool = _pools.pop(os.getpid(), None)
    if pool is not None:
        pool.stop()
