"""The listening socket, which is there before anything that takes long is imported."""

from __future__ import annotations

import socket

from rooflax.errors import RequestError
from rooflax.server.settings import Settings

BACKLOG = 1024


def listen(settings: Settings) -> socket.socket:
    """A socket that clients can connect to from now on.

    Raises:
        RequestError: the address cannot be had.
    """
    found = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        if found is not None:
            found.close()
        reason = error.strerror or str(error)
        raise RequestError(
            f"host {settings.host} with port {settings.port} cannot be listened on ({reason}); "
            f"take another.",
            param="port",
        ) from None
    return found
