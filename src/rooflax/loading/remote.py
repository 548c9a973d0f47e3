"""Headers of weight files that lie on a server, read by range requests; the weights stay there.

A file here has the remote one's length, and what was read at its place; the rest is a hole that
takes no room on disk. So the readers of safetensors and GGUF check it as any other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from rooflax.errors import CheckpointError, RequestError
from rooflax.http_client import Connection, Reply, Server
from rooflax.loading.gguf import GGUFFile, open_gguf
from rooflax.loading.safetensors import MAX_HEADER_BYTES

FIRST_BYTES = 1 << 17
"""Bytes of a file's first request: most headers of safetensors are shorter."""
MAX_GGUF_HEADER = 100 << 20
"""Metadata with a vocabulary has 5 to 20 MB."""
MAX_FILE_BYTES = 1 << 43
TIMEOUT_S = 120.0
"""For everything that is read of one model."""
MAX_REDIRECTS = 5
ROPE_TENSORS, MAX_ROPE_BYTES = "rope_", 1 << 20
"""Tensors of a GGUF file that belong to its configuration."""


@dataclass
class Session:
    """Limits for reading one model over HTTP.

    Attributes:
        token: sent to the first server alone, never where it redirects to.
        end_s: when the time is over.
    """

    token: str | None = None
    end_s: float = field(default_factory=lambda: time.monotonic() + TIMEOUT_S)

    def read(self, url: str, begin: int, end: int) -> RangePart:
        """Bytes of a remote file; fewer where it ends before.

        Raises:
            CheckpointError: they are not to be had, in one sentence.
        """
        try:
            return asyncio.run(self._read(url, begin, end))
        except TimeoutError:
            raise CheckpointError(f"{shown(url)} was not read in {TIMEOUT_S:g} s.") from None
        except ssl.SSLCertVerificationError as error:
            raise CheckpointError(f"{shown(url)}: {error.verify_message}.") from None
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"cannot read {shown(url)}: {error}.") from None

    def whole(self, url: str, most: int) -> bytes:
        """A small file.

        Raises:
            CheckpointError: as `read`, or it has more than `most` bytes.
        """
        piece = self.read(url, 0, most)
        if piece.size > most:
            raise CheckpointError(f"{shown(url)} has {piece.size} bytes, more than {most}.")
        return piece.data

    async def _read(self, url: str, begin: int, end: int) -> RangePart:
        async with asyncio.timeout(self.end_s - time.monotonic()):
            here, may_be_private = url, True
            for _ in range(MAX_REDIRECTS + 1):
                server, path = _place(here)
                addresses = await _addresses(server)
                is_private = not all(_is_global(address) for address in addresses)
                if is_private and not may_be_private:
                    raise CheckpointError(
                        f"{shown(url)} redirects to an address of a private network, which is not "
                        f"followed."
                    )
                may_be_private = is_private
                sends_token = _origin(here) == _origin(url)
                token = self.token if sends_token else None
                reply = await _get(server, addresses, path, begin, end, token)
                if reply.status not in (301, 302, 303, 307, 308):
                    return _piece(url, reply, begin, end)
                there = urljoin(here, reply.headers.get("location", ""))
                if urlsplit(here).scheme == "https" != urlsplit(there).scheme:
                    raise CheckpointError(f"{shown(url)} redirects to a place without TLS.")
                here = there
            raise CheckpointError(f"{shown(url)} redirects more than {MAX_REDIRECTS} times.")


class RangePart(NamedTuple):
    """A part of a remote file, and the bytes of all of it."""

    data: bytes
    size: int


def _place(url: str) -> tuple[Server, str]:
    """Address and path of a request.

    Raises:
        CheckpointError: it is no URL of HTTP.
    """
    with suppress(RequestError):
        server, parts = Server.of(url)._replace(base=""), urlsplit(url)
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        if re.fullmatch(r"[!-~]+", path):  # no space, no line end
            return server, path
    raise CheckpointError(f"{shown(url)} is no URL of a file.")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


async def _addresses(server: Server) -> list[str]:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


def _is_global(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or address
    return address.is_global


async def _connect(server: Server, addresses: list[str]) -> Connection:
    """Connects to the first checked address that answers, and to no others."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return await Connection.to(server, address)
    return await Connection.to(server, addresses[-1])


async def _get(
    server: Server, addresses: list[str], path: str, begin: int, end: int, token: str | None
) -> Reply:
    connection = await _connect(server, addresses)
    try:
        port = "" if server.port in (80, 443) else f":{server.port}"
        host = f"[{server.host}]" if ":" in server.host else server.host
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}{port}", "User-Agent: rooflax"]
        lines += [f"Range: bytes={begin}-{end - 1}", "Accept-Encoding: identity"]
        lines += ["Connection: close"] + [f"Authorization: Bearer {token}"] * (token is not None)
        # A server that ignores ranges begins at 0.
        return await connection.ask("\r\n".join([*lines, "", ""]).encode("ascii"), most=end)
    finally:
        connection.close()


def _piece(url: str, reply: Reply, begin: int, end: int) -> RangePart:
    """Bytes of the requested range in a response.

    Raises:
        CheckpointError: nothing, with the reason.
    """
    where, status = shown(url), reply.status
    if status in (401, 403):
        raise CheckpointError(
            f"{where} may not be read (status {status}): log in with `hf auth login`, or accept "
            f"the model's terms on its page."
        )
    if status in (404, 410):
        raise CheckpointError(f"{where} is not there (status {status}): check the name.")
    if status not in (200, 206):
        raise CheckpointError(f"{where} is answered with status {status}.")
    data = reply.body
    if status == 206:
        stated = reply.headers.get("content-range", "")
        match = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})", stated)
        if match is None or int(match[1]) != begin:
            raise CheckpointError(f"{where}: the server answers with another range than asked for.")
        size, data = int(match[2]), data[: end - begin]
    else:
        stated = reply.headers.get("content-length", "")
        if not re.fullmatch("[0-9]{1,18}", stated):
            raise CheckpointError(f"{where}: the server does not say how long it is.")
        size, data = int(stated), data[begin:end]
    if size > MAX_FILE_BYTES or len(data) < min(end, size) - begin:
        raise CheckpointError(
            f"{where}: the server states {size} bytes and sends {len(data)} of the "
            f"{end - begin} from {begin} on."
        )
    return RangePart(data, size)


def shown(url: str) -> str:
    """Without what may be secret: a query is often a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"[:300]


class _Copy:
    """A file with a remote one's length that is filled from its beginning on."""

    def __init__(self, session: Session, url: str, path: Path):
        self.session, self.url = session, url
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.held = path, 0
        data, self.size = session.read(url, 0, FIRST_BYTES)
        with open(path, "wb") as file:
            file.write(data)
            try:
                file.truncate(self.size)
            except OSError as error:
                raise CheckpointError(f"{shown(url)} has {self.size} bytes: {error}.") from error
        self.held = len(data)

    def fill(self, begin: int, end: int) -> None:
        """Reads what is missing of a range."""
        begin = max(begin, self.held)
        if begin >= min(end, self.size):
            return
        data, size = self.session.read(self.url, begin, min(end, self.size))
        if size != self.size:
            raise CheckpointError(f"{shown(self.url)} has changed while it was read.")
        with open(self.path, "r+b") as file:
            file.seek(begin)
            file.write(data)
        self.held = max(self.held, begin + len(data)) if begin == self.held else self.held


def copy_safetensors_header(session: Session, url: str, path: Path) -> None:
    """Makes `path` what `SafetensorsFile` opens.

    Raises:
        CheckpointError: it cannot be read. What the header claims is checked when it is opened.
    """
    copy = _Copy(session, url, path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length <= min(MAX_HEADER_BYTES, copy.size):  # else it is not opened
        copy.fill(0, 8 + length)


def copy_gguf_header(session: Session, url: str, path: Path) -> None:
    """Makes `path` what `GGUFFile` opens, with the tensors that belong to the configuration.

    Raises:
        CheckpointError: it cannot be read, or it is not a GGUF file.
    """
    copy = _Copy(session, url, path)
    is_header = True

    def fill(begin: int, end: int) -> None:
        if is_header:  # by ever larger pieces: nothing says before where it ends
            if end > MAX_GGUF_HEADER:
                raise CheckpointError(
                    f"{shown(url)} has a header of more than {MAX_GGUF_HEADER} bytes."
                )
            if end > copy.held:
                copy.fill(copy.held, min(max(end, 4 * copy.held), MAX_GGUF_HEADER))
        else:
            copy.fill(begin, end)

    file = GGUFFile(path, fill)
    is_header = False
    for name in file.names():
        if name.startswith(ROPE_TENSORS) and file.info(name).nbytes <= MAX_ROPE_BYTES:
            file.read(name)


def copy_gguf_url(session: Session, url: str, folder: Path) -> Path:
    """The headers of a GGUF file at a URL, and of the parts that it names.

    Raises:
        CheckpointError: as `copy_gguf_header`.
    """
    name = urlsplit(url).path.rpartition("/")[2]
    if not re.fullmatch(r"[A-Za-z0-9._\[\]-]+\.gguf", name) or len(name) > 200:
        raise CheckpointError(f"{shown(url)} is no URL of a .gguf file.")
    path = folder / name
    copy_gguf_header(session, url, path)
    open_gguf(path)
    return path
