"""The ASGI application: who may ask, how a body is read, and which route answers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooflax.errors import did_you_mean
from rooflax.loading.tokenizer import LONG_TEXT
from rooflax.server import small, tables
from rooflax.server.answers import ClientLeft, Json, note_failure
from rooflax.server.chat import chat
from rooflax.server.completions import completions
from rooflax.server.embeddings import embeddings, rerank
from rooflax.server.errors import ApiError, anthropic_body, as_api_error, openai_body
from rooflax.server.fields import FieldTable
from rooflax.server.json_body import read_json
from rooflax.server.messages import count_tokens, messages
from rooflax.server.metrics import Exporter
from rooflax.server.openapi import document
from rooflax.server.page import FILES, page
from rooflax.server.responses import input_tokens, responses
from rooflax.server.service import Service
from rooflax.server.settings import Keys, allowed_origin, host_is_allowed

BODY_S = 30.0
JSON_TYPE = "application/json"
MAX_BODIES_BYTES = 256 * 2**20
"""Bytes of all bodies that are being read."""
OPEN_PATHS = ("/health", "/ready", *FILES)
"""Routes that anybody who reaches the server may ask."""
REJECTIONS = (401, 403, 413, 429, 503)
"""Statuses of requests that are turned away, whatever they ask."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(, ?[A-Za-z0-9-]{1,64}){0,63}")
"""Clients in browsers send their own, such as x-stainless-lang."""
log = logging.getLogger("rooflax.server")
Endpoint = Callable[[Service, Request, Any], Awaitable[Response]]

POSTS: dict[str, tuple[Endpoint, FieldTable]] = {
    "/v1/completions": (completions, tables.COMPLETIONS),
    "/v1/chat/completions": (chat, tables.CHAT),
    "/v1/responses": (responses, tables.RESPONSES),
    "/v1/responses/input_tokens": (input_tokens, tables.INPUT_TOKENS),
    "/v1/messages": (messages, tables.MESSAGES),
    "/v1/messages/count_tokens": (count_tokens, tables.COUNT_TOKENS),
    "/v1/embeddings": (embeddings, tables.EMBEDDINGS),
    "/v1/rerank": (rerank, tables.RERANK),
    "/v2/rerank": (rerank, tables.RERANK),
    "/rerank": (rerank, tables.RERANK),
    "/tokenize": (small.tokenize, tables.TOKENIZE),
    "/detokenize": (small.detokenize, tables.DETOKENIZE),
    "/apply-template": (small.apply_template, tables.TEMPLATE),
    "/v1/load_lora_adapter": (small.load_lora, tables.LOAD_LORA),
    "/v1/unload_lora_adapter": (small.unload_lora, tables.UNLOAD_LORA),
}
OWN_NAMES = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "messages": "input", "response_format": "text.format"},
    "/v1/responses/input_tokens": {"prompt": "input", "messages": "input"},
    "/v1/embeddings": {"prompt": "input"},
}
"""Names that a route's clients have for fields that errors name as other routes do."""
TAKES_NO_PLACE = (
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
GETS: dict[str, Callable[[Service, Request], Awaitable[Response]]] = {
    "/v1/models": small.models,
    "/v1/models/{name:path}": small.model,
    "/health": small.health,
    "/ready": small.ready,
    "/version": small.version,
    "/props": small.props,
    "/tokenizer_info": small.tokenizer_info,
    "/": page,
}
NOT_BUILT = (
    "/v1/images/generations", "/v1/audio/speech",
    "/v1/audio/transcriptions", "/v1/moderations",
)  # fmt: skip


def make_app(service: Service) -> ASGIApp:
    """The application of one service."""
    exporter = Exporter(service)
    routes = [
        Route(path, _post(service, post), methods=["POST"]) for path, (post, _) in POSTS.items()
    ]
    routes += [Route(path, get_route(service, get), methods=["GET"]) for path, get in GETS.items()]
    routes += [
        Route(path, get_route(service, page), methods=["GET"]) for path in FILES if path != "/"
    ]
    routes += [Route(path, _not_built, methods=["GET", "POST"]) for path in NOT_BUILT]
    routes.append(Route("/metrics", exporter.answer, methods=["GET"]))
    routes.append(Route("/openapi.json", _openapi, methods=["GET"]))
    inner = Starlette(
        routes=routes,
        exception_handlers={HTTPException: routing_error, Exception: answered, ApiError: answered},
    )
    inner.router.redirect_slashes = False
    return Guard(inner, service, exporter)


def _post(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            service.ready()
            return await endpoint(service, request, await _json(request, service))
        except ClientLeft:
            raise
        except Exception as error:
            return said(request, error)

    return answer


async def _json(request: Request, service: Service) -> Any:
    """The body, read. Its bytes are not kept while the request is answered."""
    body = await read_body(request, service)
    if len(body) <= LONG_TEXT:
        return read_json(body)
    return await service.in_thread(read_json, body)


def get_route(service: Service, endpoint: Any) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(service, request)
        except Exception as error:
            return said(request, error)

    return answer


async def _openapi(_: Request) -> Response:
    """GET /openapi.json: this document."""
    return Json(document(POSTS, {**GETS, "/openapi.json": _openapi, "/metrics": Exporter.answer}))


async def _not_built(_: Request) -> Response:
    error = ApiError(
        "This server does not do that; its model writes text.",
        status=501,
        code="not_implemented",
    )
    return Json(openai_body(error), status_code=501)


async def routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path!r} takes {allowed}, not {request.method}."
        api_error = ApiError(message, status=405, code="method_not_allowed", headers=error.headers)
    else:
        message = f"There is no route {path!r}{_instead(path)}."
        api_error = ApiError(message, status=404, code="route_not_found")
    return said(request, api_error)


def _instead(path: str) -> str:
    """End of the sentence about an unknown route: the nearest one, or where routes are listed."""
    known = f"/v1{re.sub('^(/v1)+', '', path)}".rstrip("/")
    if known in POSTS or known in GETS:
        return f"; there is {known!r}"
    if path.startswith("/api/"):
        return "; this server has OpenAI's and Anthropic's APIs under /v1, not Ollama's"
    return did_you_mean(path, (*POSTS, *GETS)) or "; GET /openapi.json lists what there is"


async def answered(request: Request, error: Exception) -> Response:
    return said(request, error)


def said(request: Request, error: Exception) -> Response:
    """An error as the answer of its route."""
    note_failure(error, request.scope)
    api_error = as_api_error(error)
    api_error.param = _own_name(request.url.path, api_error)
    return error_answer(request.scope, api_error)


def _own_name(path: str, error: ApiError) -> str | None:
    """A field as the route's own clients know it."""
    name, dot, rest = (error.param or "").partition(".")
    name, bracket, index = name.partition("[")
    alias = OWN_NAMES.get(path, {}).get(name)
    if alias is None or error.code == "unknown_parameter":
        return error.param
    if name in POSTS[path][1].fields and error.code != "context_length_exceeded":
        return error.param
    return alias if alias == "input" else f"{alias}{bracket}{index}{dot}{rest}"


def error_answer(scope: Scope, error: ApiError) -> Json:
    """An error in the shape of the API that was asked."""
    if error.status in REJECTIONS:
        scope["rejected"] = error.code
    is_anthropic = scope["path"].startswith("/v1/messages")
    body = anthropic_body(error, scope["request_id"]) if is_anthropic else openai_body(error)
    headers = dict(error.headers)
    # The rest of the body is not read; or another server shall be asked.
    if error.status in (401, 408, 413, 415) or error.code == "draining":
        headers["Connection"] = "close"
    return Json(body, status_code=error.status, headers=headers)


async def read_body(request: Request, service: Service, wanted: str = JSON_TYPE) -> bytes:
    """A body of a type, within limits of size and time.

    Raises:
        ApiError: 413, 415 or 408; 429, too much is being read.
    """
    most = service.settings.max_body_bytes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted and not (wanted == JSON_TYPE and kind.endswith("+json")):
        raise ApiError(
            f"content-type is {kind[:60]!r}; it must be {wanted}.",
            status=415,
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            "The body is compressed; send it as it is.", status=415, code="unsupported_encoding"
        )
    too_large = ApiError(
        f"The body has more than {most} bytes.", status=413, code="request_too_large"
    )
    stated = request.headers.get("content-length", "0").strip(" \t")
    if not stated.isdigit() or len(stated) > 18 or int(stated) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                service.num_body_bytes += len(piece)
                if len(body) > most:
                    raise too_large
                if service.num_body_bytes > MAX_BODIES_BYTES:
                    raise service.queue_full("Many large bodies are being read")
    except TimeoutError:
        raise ApiError(
            f"The body did not come within {BODY_S:g} s.", status=408, code="request_timeout"
        ) from None
    except ClientDisconnect:
        raise ClientLeft from None
    finally:
        service.num_body_bytes -= len(body)
    return bytes(body)


class Guard:
    """Around every request: its id, the checks of Host, key and origin, the headers of each answer,
    a count, and a line in the log."""

    def __init__(self, app: ASGIApp, service: Service, exporter: Exporter):
        self._app, self._service, self._exporter = app, service, exporter
        self._keys = Keys(service.settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        headers = dict(reversed(scope["headers"]))  # of two equal ones the first counts
        stated = headers.get(b"x-request-id", b"").decode("latin-1")
        scope["request_id"] = (
            stated if _SAFE_ID.fullmatch(stated) else f"req_{secrets.token_hex(12)}"
        )
        scope["owner"], status = "", 0
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = allowed_origin(self._service.settings, origin)
        extra = self._headers(scope["request_id"], allowed)

        async def send_with(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                spent = f"{1000 * (time.perf_counter() - started):.1f}".encode()
                timing = (b"openai-processing-ms", spent)
                names = {name for name, _ in message["headers"]}
                further = [pair for pair in (*extra, timing) if pair[0] not in names]
                message = {**message, "headers": [*message["headers"], *further]}
            await send(message)

        try:
            rejected = self._rejection(scope, headers, may_ask=allowed is not None)
            answer: ASGIApp = self._app if rejected is None else rejected
            await answer(scope, receive, send_with)
        except ClientLeft:
            status = 499
            self._service.cancelled["disconnect"] += 1
        finally:
            if "timed_out" in scope:
                self._service.cancelled["timeout"] += 1
            if "rejected" in scope:
                self._service.rejected[scope["rejected"]] += 1
            self._done(scope, status, time.perf_counter() - started)

    def _headers(self, request_id: str, origin: str | None) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"x-request-id", request_id.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if origin is not None:
            headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"Origin"),
            ]
            exposed = b"x-request-id, x-rooflax-seed, x-rooflax-ignored, retry-after"
            headers.append((b"access-control-expose-headers", exposed))
        return headers

    def _rejection(
        self, scope: Scope, headers: dict[bytes, bytes], *, may_ask: bool
    ) -> Response | None:
        """The answer of a request that goes no further."""
        settings = self._service.settings
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            error = ApiError("There is more than one Host header.", code="invalid_http")
            return error_answer(scope, error)
        if not host_is_allowed(settings, headers.get(b"host", b"").decode("latin-1")):
            error = ApiError(
                "The Host header names another host; ask under the server's own name.",
                status=403,
                code="host_not_allowed",
            )
            return error_answer(scope, error)
        if may_ask and scope["method"] == "OPTIONS":
            wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
            allowed = {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": wanted if _HEADER_NAMES.fullmatch(wanted) else "",
                "Access-Control-Max-Age": "600",
            }
            return Response(status_code=204, headers=allowed)
        if self._keys and scope["path"] not in OPEN_PATHS:
            owner = self._keys.owner(_key(headers))
            if owner is None:
                error = ApiError(
                    "There is no valid key; send Authorization: Bearer KEY, or x-api-key: KEY.",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return error_answer(scope, error)
            scope["owner"] = owner
        if scope["method"] == "POST" and scope["path"] in POSTS:
            # Checked again before an answer is opened; here a rejection costs least.
            takes_place = scope["path"] not in TAKES_NO_PLACE
            full = self._service.no_place(scope["owner"]) if takes_place else None
            if full is not None:
                return error_answer(scope, full)
        return None

    def _done(self, scope: Scope, status: int, seconds: float) -> None:
        is_post = scope["method"] == "POST" and scope["path"] in POSTS
        route = scope["path"] if is_post else getattr(scope.get("route"), "path", "other")
        self._exporter.answered(route, status)
        if route in ("/health", "/ready", "/metrics"):
            return
        line = {
            "id": scope["request_id"], "method": scope["method"], "route": route,
            "status": status, "seconds": round(seconds, 4),
        }  # fmt: skip
        log.info("%s", json.dumps(line))


def _key(headers: dict[bytes, bytes]) -> bytes | None:
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key")
