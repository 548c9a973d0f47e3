"""The chat page: static files without a build step, which ask this server only.

`vendor` holds the Markdown parser and the sanitizer; the rest is ours.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from rooflax.server.service import Service

_SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/app.js": ("app.js", _SCRIPT),
    "/page/highlight.js": ("highlight.js", _SCRIPT),
    "/page/marked.js": ("vendor/marked.umd.js", _SCRIPT),
    "/page/purify.js": ("vendor/purify.min.js", _SCRIPT),
}
"""By path: the file and its type. Anybody may read them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
"""The page runs what comes from here as a file, and nothing that stands in a text."""


@cache
def _file(path: str) -> tuple[bytes, dict[str, str]]:
    """A file and its headers."""
    name, kind = FILES[path]
    data = files(__name__).joinpath(name).read_bytes()
    return data, {
        "content-type": kind,
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
        "etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"',
        "cache-control": "no-cache",
    }


async def page(service: Service, request: Request) -> Response:
    """GET /: the chat page and its files, the same bytes for every client."""
    data, headers = _file(request.url.path)
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers)
