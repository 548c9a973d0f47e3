"""The life of a server process: it listens, loads, serves, drains, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from rooflax.errors import EngineError, RequestError
from rooflax.server.app import make_app
from rooflax.server.listening import BACKLOG
from rooflax.server.service import Service
from rooflax.server.settings import Settings
from rooflax.server.wire import Protocol

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM

KEEP_ALIVE_S = 75
WATCH_S = 0.5
SWITCH_S = 5e-4
"""A thread that waits for another's Python asks for its turn this often: the engine's thread and
the loop each need little of it, and neither should wait long."""
TOLD_S = 5.0
"""Longest wait, after a drain's time, for streams that were ended to say why."""
TERMINATED, INTERRUPTED = 143, 130
log = logging.getLogger("rooflax.server")
Load = Callable[[Callable[[str], None]], "AsyncLLM"]


class ServerRunner:
    """Serves one model until a signal, or the engine, ends it.

    Args:
        load: makes the engine, on a thread of its own; says by its argument what it does.
        says: tells the operator a line.
        service: what the engine is behind; None is a `Service`.
        app: makes its application.
    """

    def __init__(
        self,
        settings: Settings,
        load: Load,
        says: Callable[[str], None],
        service: Service | None = None,
        app: Callable[[Any], ASGIApp] = make_app,
    ):
        self.service, self._make_app = service or Service(settings), app
        self._settings, self._load, self._says = settings, load, says
        self._signals: list[int] = []
        self._failure: BaseException | None = None
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Ends it from another thread, at once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ends)

    def run(self, listener: socket.socket) -> int:
        """Until the end; the process's exit code.

        Raises:
            RooflaxError: loading failed, or the engine died.
        """
        config = uvicorn.Config(
            self._make_app(self.service),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(self._serve(listener))
        finally:
            sys.setswitchinterval(before)
        if self._failure is not None:
            raise self._failure
        return INTERRUPTED if self._signals[:1] == [signal.SIGINT] else 0

    async def _serve(self, listener: socket.socket) -> None:
        assert self._server is not None
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, self._signalled, number)
        # A daemon: a load that hangs must not keep a process alive that was told to end.
        threading.Thread(target=self._load_it, args=(loop,), daemon=True).start()
        watch = loop.create_task(self._watch())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            watch.cancel()
            if self.service.engine is not None:
                with contextlib.suppress(EngineError):
                    await self.service.engine.shutdown(drain=False)

    def _load_it(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            engine = self._load(self._progress)
        except BaseException as error:
            loop.call_soon_threadsafe(self._ends, error)
            return
        loop.call_soon_threadsafe(self._loaded, engine)

    def _progress(self, text: str) -> None:
        self.service.progress = text

    def _loaded(self, engine: AsyncLLM) -> None:
        try:
            self.service.is_loaded(engine)
        except RequestError as error:
            self._ends(error)
            return
        seconds = time.monotonic() - self.service.started_s
        names = ", ".join(self.service.names)
        self._says(f"{names} is ready after {seconds:.1f} s")

    def _ends(self, error: BaseException | None = None) -> None:
        assert self._server is not None
        self._failure = self._failure or error
        self._server.should_exit = True

    async def _watch(self) -> None:
        """Ends the process when the engine has died; says once when it is stuck."""
        is_stuck = False
        while True:
            await asyncio.sleep(WATCH_S)
            if self.service.state != "failed":
                is_stuck = False
            elif self.service.failure:
                if not self._settings.stays:
                    return self._ends(EngineError(self.service.failure))
            elif not is_stuck:
                is_stuck = True
                log.error("the engine has made no step for %g s", self._settings.stall_s)
                faulthandler.dump_traceback(all_threads=True)

    def _signalled(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1 or self.service.engine is None:
            # The engine's thread may be inside XLA, which does not survive an orderly end.
            is_first = len(self._signals) == 1
            code = TERMINATED if number == signal.SIGTERM else INTERRUPTED
            os._exit(0 if is_first and number == signal.SIGTERM else code)
        self._says(f"stopping: at most {self._settings.drain_s:g} s for what is open")
        self.service.drains()
        self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + self._settings.drain_s
        while self.service.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.service.num_open and self.service.engine is not None:
            self.service.cancelled["drain"] += self.service.num_open
            await self.service.engine.shutdown(drain=False)
            deadline = time.monotonic() + TOLD_S
            while self.service.num_open and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)  # their last bytes are written
        self._ends()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end a process by the signal instead of 0."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield
