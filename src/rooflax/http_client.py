"""An HTTP client that costs little while it listens: bytes are kept with their times.

For HTTP/1.1 servers; one connection asks one thing at a time. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rooflax.errors import RequestError

CONNECT_S = 10.0


class Server(NamedTuple):
    """Where requests go.

    Attributes:
        base: of every path, without a slash at its end.
    """

    host: str
    port: int
    is_tls: bool
    base: str
    key: str | None = None

    @staticmethod
    def of(url: str, key: str | None = None) -> Server:
        """A server by its URL; "/v1" at the end may be there or not.

        Raises:
            RequestError: it is no URL of HTTP.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(
                f"url is {url[:100]!r}; it must be like http://127.0.0.1:8000.", param="url"
            )
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return Server(parts.hostname, port or (443 if is_tls else 80), is_tls, base, key)

    def headers(self) -> dict[str, str]:
        """Of every request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {"Host": f"{host}:{self.port}", "Content-Type": "application/json"} | key

    def request(self, path: str, body: Any = None) -> bytes:
        """A request as it is written: POST with a body, else GET."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1"]
        fields = self.headers() | {"Content-Length": str(len(content))}
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode() + content


class Reply(NamedTuple):
    """An answer.

    Attributes:
        started_s: when the request was written.
        pieces: of the body, each with the time at which it came.
    """

    status: int
    headers: Mapping[str, str]
    started_s: float
    pieces: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def json(self) -> Any:
        """The body's document; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def events(self) -> Iterator[tuple[float, str]]:
        """The data of server-sent events, each with the time at which it was complete."""
        text = b""
        for at_s, piece in self.pieces:
            text += piece.replace(b"\r\n", b"\n")
            *whole, text = text.split(b"\n\n")
            for event in whole:
                lines = [line[5:].strip() for line in event.split(b"\n") if line[:5] == b"data:"]
                if lines:
                    yield at_s, b"\n".join(lines).decode("utf-8", "replace")


class Connection(asyncio.Protocol):
    """One connection; asked again while it lasts."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None
        self.is_open = False
        self._expect()

    def _expect(self) -> None:
        """Nothing of the next answer has come."""
        self._received: list[tuple[float, bytes]] = []
        self._head: tuple[int, dict[str, str], int] | None = None  # status, headers, its bytes
        self._count, self._tail = 0, b""

    @property
    def num_received(self) -> int:
        """Bytes of the answer so far."""
        return self._count

    @staticmethod
    async def to(server: Server) -> Connection:
        """
        Raises:
            OSError: nobody answers there.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, found = await loop.create_connection(
                Connection, server.host, server.port, ssl=server.is_tls or None
            )
        return found

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            whole = self._head is not None and self._length() is None and not self._is_chunked()
            if whole:
                self._done.set_result(None)
            else:
                self._done.set_exception(exc or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._received.append((time.perf_counter(), data))
        self._count += len(data)
        self._tail = (self._tail + data)[-7:]
        if self._head is None:
            self._head = _head(b"".join(piece for _, piece in self._received))
        if self._head is None or self._done is None or self._done.done():
            return
        length = self._length()
        if length is None:
            is_whole = self._is_chunked() and self._tail == b"\r\n0\r\n\r\n"
        else:
            is_whole = self._count >= self._head[2] + length
        if is_whole:
            self._done.set_result(None)

    def _length(self) -> int | None:
        assert self._head is not None
        stated = self._head[1].get("content-length")
        return None if stated is None else int(stated)

    def _is_chunked(self) -> bool:
        assert self._head is not None
        return self._head[1].get("transfer-encoding") == "chunked"

    async def ask(self, request: bytes) -> Reply:
        """
        Raises:
            OSError: the connection ended before the answer.
        """
        self._expect()
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        await self._done
        assert self._head is not None
        status, headers, size = self._head
        pieces = list(_behind(self._received, size))
        if self._is_chunked():
            pieces = list(_dechunked(pieces))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Reply(status, headers, started, pieces)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


class Client:
    """Connections to one server, used again."""

    def __init__(self, server: Server):
        self.server = server
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> Reply:
        """On a connection that is free, or a new one.

        Raises:
            OSError: there is no answer.
        """
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
            try:
                return await self._ask_on(connection, request)
            except ConnectionError:
                if connection.num_received:
                    raise  # else the server had closed it meanwhile, as it may
        return await self._ask_on(await Connection.to(self.server), request)

    async def _ask_on(self, connection: Connection, request: bytes) -> Reply:
        try:
            reply = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    async def get(self, path: str) -> Reply:
        return await self.ask(self.server.request(path))

    async def post(self, path: str, body: Any) -> Reply:
        return await self.ask(self.server.request(path, body))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def _head(received: bytes) -> tuple[int, dict[str, str], int] | None:
    """Status, headers and size of an answer's head; None while it is not complete."""
    text, end, _ = received.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = text.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return int(first.split()[1]), headers, len(text) + len(end)


def _behind(received: list[tuple[float, bytes]], size: int) -> Iterator[tuple[float, bytes]]:
    """What came behind the first `size` bytes."""
    for at_s, piece in received:
        if len(piece) > size:
            yield at_s, piece[size:]
        size = max(0, size - len(piece))


def _dechunked(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """A body without the sizes of its chunks."""
    line, left = b"", 0  # of the size that is being read; of the chunk and its line end
    for at_s, piece in pieces:
        found: list[bytes] = []
        while piece:
            if left:
                found.append(piece[: max(0, min(left - 2, len(piece)))])
                taken = min(left, len(piece))
                left, piece = left - taken, piece[taken:]
                continue
            before, end, piece = piece.partition(b"\n")
            line += before
            if end:
                size = int(line.split(b";")[0].strip() or b"0", 16)
                line, left = b"", size + 2 if size else 0
        if any(found):
            yield at_s, b"".join(found)
