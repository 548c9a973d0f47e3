"""uvicorn's HTTP protocol with the limits that it lacks: of headers, their time, and connections;
and with clients that leave, whatever they sent ahead.

What is rejected here never becomes a request, so its answer is written by hand.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rooflax.server.errors import ApiError, openai_body

MAX_URL_BYTES, MAX_HEADER_BYTES, MAX_HEADERS = 8 * 1024, 64 * 1024, 128
MAX_CONNECTIONS = 1024
MAX_FRAMING = 16
"""Bytes of chunk sizes and extensions for each byte of a body."""
MAX_AHEAD = 256 * 1024
"""Bytes that a client may send behind a request before it has the answer."""
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=[ \t]*:)")
HEADER_S, READ_S = 10.0, 30.0
_PHRASES = {400: "Bad Request", 414: "URI Too Long", 431: "Request Header Fields Too Large",
            501: "Not Implemented", 503: "Service Unavailable"}  # fmt: skip


class _Rejected(Exception):
    """A request is over a limit."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rejection: ApiError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._is_in_head, self._num_bytes, self._num_body_bytes = False, 0, 0
        self._current: RequestResponseCycle | None = None
        self._ahead = bytearray()
        self._owes_rejection = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._rejection = ApiError(
                "Too many connections are open; try again later.",
                status=503,
                code="overloaded",
                headers={"retry-after": "1"},
            )
            self.send_400_response("")
            return
        self._expect_head()

    def _expect_head(self) -> None:
        self._is_in_head, self._num_bytes, self._num_body_bytes = True, 0, 0
        if not self._is_answering:
            self._head_timer = self.loop.call_later(HEADER_S, self.transport.close)

    def _head_came(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._stop_watching()
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The transport closes itself now, but only once what was written has been read."""
        self._leave()

    def _leave(self) -> None:
        """The client is gone for every request that has no whole answer. uvicorn tells only the
        newest one, which may be pipelined behind the one that is being answered."""
        cycles = [self._current, *(cycle for cycle, _ in self.pipeline)]
        for cycle in cycles:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self.flow.resume_writing()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request waits for its answer, so that what comes now is pipelined."""
        current = self._current
        return current is not None and not current.response_complete and not current.more_body

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._owes_rejection and not self._is_answering:
            self._send_rejection()
        elif self._ahead and not self._is_answering and not self.transport.is_closing():
            data, self._ahead = bytes(self._ahead), bytearray()
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._rejection is not None:
            return
        if self._is_answering:
            # Kept, not parsed: uvicorn would stop reading, and so not see that the client leaves.
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD:
                self.transport.abort()
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()  # nothing is being answered, and these bytes end no other timer
        if self._is_in_head:
            data = _without_upgrade(data)
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_answering and not self.transport.is_closing():
            self.flow.resume_reading()  # also where another request came in the same packet
        most = MAX_URL_BYTES + MAX_HEADER_BYTES + MAX_FRAMING * self._num_body_bytes
        if self._num_bytes - self._num_body_bytes > most:
            self._over(431, "The headers, trailers or chunk extensions are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()
        self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._reject(414, f"The URL has more than {MAX_URL_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # of a trailer
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or self._num_header_bytes > MAX_HEADER_BYTES:
            self._reject(
                431, f"There are more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes."
            )

    def on_headers_complete(self) -> None:
        self._head_came()
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and b",".join(codings).strip().lower() != b"chunked":
            self._reject(501, "The body has a transfer coding besides chunked.", "unsupported")
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def _unsupported_upgrade_warning(self) -> None:
        """The parser has given up: of a head that `_without_upgrade` did not see whole."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_reader(self) -> None:
        """Cuts off who reads nothing for a while. Nothing is written meanwhile, so that what is
        left to read only becomes less."""
        left = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_S, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _reject(self, status: int, message: str, code: str = "request_too_large") -> None:
        self._rejection = ApiError(message, status=status, code=code)
        raise _Rejected  # ends the parser, which calls send_400_response

    def _over(self, status: int, message: str) -> None:
        self._rejection = ApiError(message, status=status, code="request_too_large")
        self.send_400_response(message)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no request, as JSON, behind those to whole requests before it;
        then the connection is closed."""
        if self._rejection is None:
            self._rejection = ApiError("The request is not valid HTTP.", code="invalid_http")
        self._head_came()
        self._owes_rejection = self._is_answering
        if not self._owes_rejection:
            self._send_rejection()

    def _send_rejection(self) -> None:
        error = self._rejection
        assert error is not None
        body = msgspec.json.encode(openai_body(error))
        headers = {
            "content-type": "application/json", "content-length": len(body),
            "x-request-id": f"req_{secrets.token_hex(12)}", "connection": "close",
        } | error.headers  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n{lines}\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head that asks for no other protocol, such as h2c: the parser would lose the body."""
    head, mark, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"x-upgrade", head) + mark + rest
