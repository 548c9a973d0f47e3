"""The ways an answer goes out: one JSON document, or server-sent events from one writer.

Neither outlives its client: when the connection closes, the work behind it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rooflax.errors import first_line
from rooflax.server.errors import ApiError, as_api_error

PING_S = 15.0
PING = b": ping\n\n"
WRITE_S = 30.0
"""The most that a client may take to read what was written."""
log = logging.getLogger("rooflax.server")
encode = msgspec.json.encode


class Json(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, encode(data))


DONE = b"data: [DONE]\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Awaits the work, and cancels it when the client disconnects.

    Raises:
        ClientLeft: that happened.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class ClientLeft(Exception):
    """The client closed the connection before it had its answer."""


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """A stream of events; the status is held back until the first one, or a ping, is due.

    Args:
        pieces: whole events.
        failed: an error as events, for one that comes after the status went out.
        headers: of the answer.
        seconds: the most that the stream may take.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        failed: Callable[[ApiError], bytes],
        headers: Mapping[str, str],
        seconds: float,
    ):
        self._pieces, self._failed, self._seconds = pieces, failed, seconds
        self._has_begun = self._is_slow = False
        self._sending_since: float | None = None
        self._sent_s, self._lock = time.monotonic(), asyncio.Lock()
        stream = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers(stream | dict(headers))
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(scope, send))
        gone = asyncio.ensure_future(_left(receive))
        watcher = asyncio.ensure_future(self._watch(send, writer))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                raise ClientLeft
            if self._is_slow:
                scope["abort"]()  # its buffer is full: nothing more can be said
                raise ClientLeft
            writer.result()
        finally:
            for each in (writer, gone, watcher):
                each.cancel()
            await asyncio.gather(writer, gone, watcher, return_exceptions=True)

    async def _watch(self, send: Send, writer: asyncio.Future[None]) -> None:
        """Pings while nothing is written; cuts off who does not read. One timer at a time, however
        many pieces there are."""
        while not self._is_slow:
            since = self._sending_since
            due = self._sent_s + PING_S if since is None else since + WRITE_S
            left = due - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, WRITE_S))
            elif since is None:
                try:
                    async with asyncio.timeout(WRITE_S):
                        await self._send(send, PING)
                except TimeoutError:
                    self._is_slow = True
            else:
                self._is_slow = True
        writer.cancel()

    async def _write(self, scope: Scope, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds), aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    await self._send(send, piece)
        except Exception as error:
            note_failure(error, scope)
            if not self._has_begun:  # after other errors than this the connection would be closed
                raise as_api_error(error) from None
            await self._send(send, self._failed(as_api_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        async with self._lock:
            self._sending_since = time.monotonic()
            if not self._has_begun:
                self._has_begun = True
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sending_since, self._sent_s = None, time.monotonic()


def note_failure(error: Exception, scope: Scope) -> None:
    """Our own faults go to the log as a line of JSON, with where they come from; a client's do
    not. A request that took too long is counted by the guard around it."""
    if isinstance(error, TimeoutError):
        scope["timed_out"] = True
    if isinstance(error, ApiError | ClientLeft | TimeoutError):
        return
    if as_api_error(error).status >= 500:
        trace = "".join(traceback.format_exception(error))
        line = {"id": scope["request_id"], "error": first_line(error), "traceback": trace}
        log.error("a request failed: %s", json.dumps(line))
