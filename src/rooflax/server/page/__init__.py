"""The chat page: one file without a build step, which asks this server only."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from rooflax.server.service import Service

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers: what it may load and run is what is in it."""
    data = (files(__name__) / "index.html").read_bytes()
    allowed = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(data):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        allowed[kind.decode()] += f" 'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src{allowed['script']}; style-src{allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return data, {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"',
        "cache-control": "no-cache",
    }


async def page(service: Service, request: Request) -> Response:
    """GET /: the same bytes for everybody."""
    data, headers = _page()
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers)
