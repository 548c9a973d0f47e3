"""`Work`: what clients ask of the trainer, done one after the other on a thread, and its results.

A client sends its request, gets an id, and asks for the result until it is there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rooflax.completion import Completion
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import CheckpointError, RequestError, first_line
from rooflax.models.model import Model
from rooflax.rl.trainer import Trainer
from rooflax.server.errors import ENGINE_FAILED, ApiError

MOST_WAITING = 4096
"""Requests that wait; a client of samples sends a batch of them at once."""
MOST_BYTES = 256 * 2**20
"""Bytes of the data of those that wait."""
MOST_SAMPLES = 1024
"""Samples of all requests that are answered together."""
MOST_KEPT = 4 * MOST_WAITING
"""Requests whose results are kept; of more the oldest go."""
ENDS_S = 10.0
"""Seconds that the end of the server waits for what is being done."""
KEPT_S, RETRIEVED_S = 3600.0, 120.0
"""Seconds for which a result is kept: one that nobody asked for, and one that was answered."""
log = logging.getLogger("rooflax.server")
Result = dict[str, Any] | bytes
"""JSON, or a protocol buffer."""


@dataclass
class Task:
    """A request on its way.

    Attributes:
        do: what is asked, on the worker's thread.
        sample: of a request for samples in its place: the sampler, the prompt, its parameters, and
            what makes a result of the completions.
        until_s: when its result may go, by the monotonic clock.
        num_bytes: of its data.
        key: the same of the same request that is sent again, as after a lost connection; None of
            one that has none.
    """

    do: Callable[[], Result] | None = None
    sample: tuple[Model, list[int], SamplingParams, Callable[[list[Completion]], Result]] | None = (
        None
    )
    done: Future[Result] = field(default_factory=Future)
    until_s: float = float("inf")
    key: tuple[Any, ...] | None = None
    num_bytes: int = 0


class Work:
    """The worker of one trainer."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._waiting = deque[Task]()
        self._tasks: dict[str, Task] = {}
        self._by_key: dict[tuple[Any, ...], str] = {}
        self._changed = threading.Condition()
        self._is_ended = self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="rooflax-trainer", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> str:
        """The id by which the result is asked for; of a request that came before, the same.

        Raises:
            ApiError: 429, too much waits.
        """
        now, request_id = time.monotonic(), secrets.token_hex(12)
        with self._changed:
            self._forget(now)
            if task.key in self._by_key:
                return self._by_key[task.key]
            num_bytes = task.num_bytes + sum(each.num_bytes for each in self._waiting)
            if len(self._waiting) >= MOST_WAITING or num_bytes > MOST_BYTES:
                raise ApiError(
                    f"{len(self._waiting)} requests wait; try again later.",
                    status=429,
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._tasks[request_id] = task
            if task.key is not None:
                self._by_key[task.key] = request_id
            self._waiting.append(task)
            self._changed.notify()
        return request_id

    def _forget(self, now: float) -> None:
        """Lets go of results that were kept long enough, and of the oldest beyond the most."""
        done = [name for name, one in self._tasks.items() if one.done.done()]
        done.sort(key=lambda name: self._tasks[name].until_s)  # what was fetched goes first
        spare = done[: max(len(self._tasks) - MOST_KEPT, 0)]
        for name in {*spare, *(name for name in done if self._tasks[name].until_s < now)}:
            key = self._tasks.pop(name).key
            if key is not None:
                del self._by_key[key]

    async def result(self, request_id: str, wait_s: float | None = None) -> Result | None:
        """A request's result; None if it is not there after `wait_s` seconds, if there is a limit.

        Raises:
            ApiError: 410, nobody knows the request any more.
            RooflaxError: the request failed.
        """
        with self._changed:
            task = self._tasks.get(request_id)
        if task is None:
            raise ApiError(
                f"There is no request {request_id[:80]!r}, or its result was kept long enough.",
                status=410,
                code="request_unknown",
            )
        # Shielded: who stops waiting does not take the result from others.
        waiting = asyncio.shield(asyncio.wrap_future(task.done))
        done, _ = await asyncio.wait([waiting], timeout=wait_s)
        if not done:
            waiting.cancel()
            return None
        task.until_s = min(task.until_s, time.monotonic() + RETRIEVED_S)
        return waiting.result()

    def end(self) -> None:
        """Ends the thread after what it does just now, and waits some time for that; what waits
        fails."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()
        self._thread.join(ENDS_S)

    @property
    def num_waiting(self) -> int:
        """Requests that are not done."""
        return len(self._waiting) + self._is_busy

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_ended:
                    self._changed.wait()
                if self._is_ended:
                    left, self._waiting = list(self._waiting), deque()
                    for task in left:
                        task.done.set_exception(RequestError("The server was stopped."))
                    return
                tasks = self._next()
                self._is_busy = True
            self._do(tasks)
            self._is_busy = False

    def _next(self) -> list[Task]:
        """The next task; of samples all that wait for the same sampler, whose model stays."""
        first = self._waiting.popleft()
        if first.sample is None:
            return [first]
        tasks, others, count = [first], list[Task](), first.sample[2].n
        for task in self._waiting:
            same = task.sample is not None and task.sample[0] is first.sample[0]
            if same and task.sample is not None and count + task.sample[2].n <= MOST_SAMPLES:
                tasks.append(task)
                count += task.sample[2].n
            else:
                others.append(task)
        self._waiting = deque(others)
        return tasks

    def _do(self, tasks: list[Task]) -> None:
        try:
            makers = self._results(tasks)
        except BaseException as error:
            if len(tasks) > 1:  # one of them may be all that fails
                for task in tasks:
                    self._do([task])
                return
            tasks[0].done.set_exception(self._told(error))
        else:
            for task, make in zip(tasks, makers, strict=True):
                try:
                    task.done.set_result(make())
                except BaseException as error:
                    task.done.set_exception(self._told(error))
        until_s = time.monotonic() + KEPT_S
        for task in tasks:
            task.do = task.sample = None  # their data are not kept
            task.until_s = min(task.until_s, until_s)

    def _results(self, tasks: list[Task]) -> list[Callable[[], Result]]:
        """Makers of each task's result."""
        if tasks[0].do is not None:
            result = tasks[0].do()
            return [lambda: result]
        samples = [task.sample for task in tasks if task.sample is not None]
        requests = [(ids, params) for _, ids, params, _ in samples]
        groups = self._trainer.sample(samples[0][0], requests)
        return [partial(make, group) for (*_, make), group in zip(samples, groups, strict=True)]

    def _told(self, error: BaseException) -> Exception:
        """Error for the client; of faults of ours the log has more."""
        if isinstance(error, RequestError | CheckpointError | ApiError):
            return error
        if isinstance(error, OSError):
            return RequestError(f"A file cannot be read or written: {first_line(error)}.")
        log.error("a training request failed", exc_info=error)
        return ApiError(ENGINE_FAILED, status=500, code="engine_error")
