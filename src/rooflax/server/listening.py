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
    listener = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or str(error)
        raise RequestError(
            f"host {settings.host} with port {settings.port} cannot be listened on ({reason}); "
            f"take another.",
            param="port",
        ) from None
    return listener
