"""An HTTP client that costs little while it listens: bytes are kept with their times.

For HTTP/1.1 servers; one connection asks one thing at a time. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rooflax.errors import RequestError

CONNECT_S, ANSWER_S = 10.0, 3600.0
MOST_HEAD, MOST_LINE, MOST_ERROR = 1 << 16, 1 << 20, 1 << 16
"""Bytes of headers, of an event's line, and of an answer that is an error."""
MOST_BODY = 1 << 28
"""Bytes of any other answer: 2048 embeddings of 4096 numbers, or a stream of a million tokens."""
MOST_SIZE_LINE = 4096
"""Bytes of the line before a chunk."""
TOO_LONG = f"the server's answer has a line of more than {MOST_LINE >> 20} MiB"


class BadAnswer(OSError):
    """A server's answer that cannot be read; its text says why."""


class Server(NamedTuple):
    """Address of a server.

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
        """Headers of every request."""
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
        """The data of server-sent events, each with the time at which it was complete.

        Raises:
            BadAnswer: a line is too long.
        """
        rest, data = b"", []
        for at_s, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MOST_LINE:
                raise BadAnswer(TOO_LONG)
            for line in lines:
                if line[:5] == b"data:":
                    data.append(line[5:].strip())
                elif data and line in (b"", b"\r"):
                    yield at_s, b"\n".join(data).decode("utf-8", "replace")
                    data = []


class Connection(asyncio.Protocol):
    """One connection; asked again while it lasts."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None
        self.is_open = False
        self._expect()

    def _expect(self) -> None:
        """Resets the parser for the next response."""
        self._pieces: list[tuple[float, bytes]] = []
        self._start = bytearray()  # of a head that is not complete
        self._head: tuple[int, dict[str, str]] | None = None  # status, headers
        self._chunks: Chunks | None = None
        self._left: int | None = None  # of a body whose length is stated
        self._count = 0  # bytes of the head, then of the body
        self._most: int | None = None  # of the body, that are wanted

    @property
    def has_begun(self) -> bool:
        """Whether something of the answer has come."""
        return self._head is not None or self._count > 0

    @staticmethod
    async def to(server: Server, address: str | None = None) -> Connection:
        """
        Args:
            address: of the server's host; None looks it up.

        Raises:
            OSError: the server does not answer.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                Connection, address or server.host, server.port, ssl=server.is_tls or None,
                server_hostname=server.host if server.is_tls else None,
            )  # fmt: skip
        return connection

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            whole = self._head is not None and self._left is None and self._chunks is None
            if whole:
                self._done.set_result(None)
            else:
                self._done.set_exception(exc or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        at_s = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # nothing was asked
            return
        try:
            is_whole = self._take(at_s, data)
        except BadAnswer as error:
            self._done.set_exception(error)
            self.close()
            return
        if is_whole:
            self._done.set_result(None)

    def _take(self, at_s: float, data: bytes) -> bool:
        """Whether the answer is complete with this.

        Raises:
            BadAnswer: it is none, or too long.
        """
        self._count += len(data)
        if self._head is None:
            data = self._take_head(data)
            if self._head is None:
                return False
        status = self._head[0]
        if self._most is None and max(self._count, self._left or 0) > most_of(status):
            raise too_long(status)
        is_whole = False
        if self._chunks is not None:
            data, is_whole = self._chunks.take(data), self._chunks.is_whole
        elif self._left is not None:
            if len(data) > self._left:
                self.is_open = False  # what follows belongs to no answer
                data = data[: self._left]
            self._left -= len(data)
            is_whole = self._left == 0
        if data:
            self._pieces.append((at_s, data))
        if self._most is not None and not is_whole:
            self._most -= len(data)
            if self._most <= 0:
                self.is_open, is_whole = False, True
        return is_whole

    def _take_head(self, data: bytes) -> bytes:
        """Returns the bytes behind the head once the head is complete."""
        start = self._start
        looked = max(0, len(start) - 3)
        start += data
        while True:
            if not b"HTTP/".startswith(start[:5]):
                raise BadAnswer("the server's answer is not HTTP")
            end = start.find(b"\r\n\r\n", looked)
            if (self._count if end < 0 else end) > MOST_HEAD:
                raise BadAnswer(f"the server's answer has over {MOST_HEAD >> 10} KiB of headers")
            if end < 0:
                return b""
            status, headers = _head(bytes(start[:end]))
            del start[: end + 4]
            if status >= 200:
                break
            looked = 0  # it says that an answer will come
        self._head = status, headers
        self._count = len(start)
        if headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._chunks = Chunks()
        elif status in (204, 304):
            self._left = 0
        elif (stated := headers.get("content-length")) is not None:
            if re.fullmatch("[0-9]{1,18}", stated) is None:
                raise BadAnswer("the server's answer has a Content-Length that is not a number")
            self._left = int(stated)
        return bytes(start)

    async def ask(self, request: bytes, most: int | None = None) -> Reply:
        """
        Args:
            most: bytes of the body after which the connection is closed; None reads all of it.

        Raises:
            BadAnswer: what comes is no answer of HTTP, or too long.
            OSError: the connection ended before the answer, or it took over ANSWER_S.
        """
        self._expect()
        self._most = most
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S):
            await self._done
        assert self._head is not None
        status, headers = self._head
        if headers.get("connection", "").lower() == "close" or not self.is_open:
            self.close()
        return Reply(status, headers, started, self._pieces)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


class Client:
    """Connections to one server, used again."""

    def __init__(self, server: Server):
        self.server = server
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> Reply:
        """Sends a request over a free connection, or a new one.

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
                if connection.has_begun:
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


class Chunks:
    """Takes a body out of its chunks, wherever they are cut.

    Attributes:
        is_whole: the last one has come, and the headers behind it.
    """

    def __init__(self) -> None:
        self.is_whole = self._is_last = False
        self._line, self._left = b"", 0  # before a chunk; of the chunk and its line end

    def take(self, data: bytes) -> bytes:
        """The body's part of these bytes.

        Raises:
            BadAnswer: a chunk's size is none.
        """
        chunks, at = [], 0
        while at < len(data) and not self.is_whole:
            if self._left:
                taken = min(self._left, len(data) - at)
                chunks.append(data[at : at + max(0, min(self._left - 2, taken))])
                self._left, at = self._left - taken, at + taken
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or None]
            at = end or len(data)
            if len(self._line) > MOST_SIZE_LINE:
                raise BadAnswer("the server's answer has a chunk without its size")
            if end:
                self._begin(self._line.strip())
                self._line = b""
        return b"".join(chunks)

    def _begin(self, line: bytes) -> None:
        if self._is_last:
            self.is_whole = not line
            return
        size = line.partition(b";")[0].strip()
        if re.fullmatch(b"[0-9a-fA-F]{1,15}", size) is None:
            raise BadAnswer("the server's answer has a chunk without its size")
        self._left = int(size, 16)
        self._is_last = self._left == 0
        self._left += 0 if self._is_last else 2


def most_of(status: int) -> int:
    """Bytes that an answer may have."""
    return MOST_BODY if status < 300 else MOST_ERROR


def too_long(status: int) -> BadAnswer:
    """Error for an oversized response."""
    most = most_of(status)
    shown = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
    return BadAnswer(f"the server's answer (status {status}) is over {shown} long")


def _head(text: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    first, *lines = text.decode("latin-1").split("\r\n")
    match = re.match("HTTP/[0-9.]+ ([0-9]{3})(?![0-9])", first)
    if match is None:
        raise BadAnswer("the server's answer is not HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(match[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def event(data: str | bytes) -> dict[str, Any]:
    """The document of an event of a stream.

    Raises:
        BadAnswer: it is no JSON object.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        parsed = ""
    return _checked(parsed, dict, "a JSON object")


def choices(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Choices of an event; empty if it has none.

    Raises:
        BadAnswer: they are no objects.
    """
    listed = _checked(event.get("choices", []), list, "a list of choices")
    return [_checked(one, dict, "a list of choices") for one in listed]


def part(fields: Mapping[str, Any], name: str, kind: type[Any] = str) -> Any:
    """A field of text, or of an object; an empty one where there is none.

    Raises:
        BadAnswer: it is something else.
    """
    return _checked(fields.get(name), kind, f"one with {name} that is {KINDS[kind]}")


KINDS = {str: "text", dict: "an object"}


def _checked(value: Any, kind: type[Any], wanted: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise BadAnswer(f"the server's answer is not {wanted}")
    return value


def reason(document: Any) -> str | None:
    """Reason why a request failed, from the response."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:300] if isinstance(message, str) and message else None
