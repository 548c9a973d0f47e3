"""A server that answers with given bytes, for clients to read."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """An answer with its length; `more` are whole lines of its head."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), more, body)


def chunked(*pieces: bytes) -> bytes:
    sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return CHUNKED + sent + b"0\r\n\r\n"


def events(*data: bytes) -> bytes:
    """A stream with these events."""
    return chunked(*(b"data: %s\n\n" % each for each in data))


MODELS = whole(b'{"data": [{"id": "m"}]}')


@contextlib.contextmanager
def answering(
    said: bytes, models: bytes = MODELS, *, closes: bool = False, is_endless: bool = False
) -> Iterator[str]:
    """The URL of a server; what is sent to its POST routes is `said`.

    Args:
        closes: the connection behind it; else the client must know where the answer ends.
        is_endless: the last byte comes again and again.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while head := self.rfile.readline():
                    size = 0
                    while (line := self.rfile.readline().strip()) != b"":
                        if line.lower().startswith(b"content-length:"):
                            size = int(line.split(b":")[1])
                    self.rfile.read(size)
                    is_post = head.startswith(b"POST")
                    self.wfile.write(said if is_post else models)
                    while is_post and is_endless:
                        self.wfile.write(said[-1:] * (1 << 16))
                    if is_post and closes:
                        return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
