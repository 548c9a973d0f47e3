"""`ApiCall`: what the routes that generate have in common, from the body to the usage."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rooflax import __version__
from rooflax.completion import Completion, Delta
from rooflax.errors import EngineError
from rooflax.server.answers import Events, Json, while_connected
from rooflax.server.errors import ApiError
from rooflax.server.fields import FieldTable
from rooflax.server.sampling import seed_of
from rooflax.server.service import Service

FINGERPRINT = f"rooflax-{__version__}"
MAX_IGNORED = 32
"""Fields that are named in the header; clients take headers of a few KiB."""
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")
"""A name with a line break would be a header of its own."""


@dataclass
class Usage:
    """Tokens of an answer so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    first_tokens: int = 0

    def count(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.tokens)
        self.last_s = time.perf_counter()
        if self.first_s is None:
            self.first_s, self.first_tokens = self.last_s, len(delta.tokens)
        if delta.completion is not None and delta.index == 0:
            self.cached_tokens += delta.completion.num_cached_tokens

    def openai(self) -> dict[str, Any]:
        """As OpenAI's chat and completions state it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, Any]:
        """Times so far in llama.cpp's words. The prompt's end with the first tokens, time in the
        queue included; those that are predicted per second are the later ones."""
        first_s = self.last_s if self.first_s is None else self.first_s
        prompt_n = self.prompt_tokens - self.cached_tokens
        timings: dict[str, Any] = {"cache_n": self.cached_tokens}
        for name, count, timed, seconds in (
            ("prompt", prompt_n, prompt_n, first_s - self.started_s),
            ("predicted", self.completion_tokens, self.completion_tokens - self.first_tokens,
             self.last_s - first_s),
        ):  # fmt: skip
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds,
                f"{name}_per_token_ms": 1000 * seconds / timed if timed else 0.0,
                f"{name}_per_second": timed / seconds if seconds > 0 else 0.0,
            }
        return timings


@dataclass
class ApiCall:
    """One request to a route that generates.

    Attributes:
        fields: its honoured fields.
        ignored: unknown fields that were passed over.
        seed: that its samples are drawn with.
        owner: a name of its key.
    """

    service: Service
    request: Request
    fields: dict[str, Any]
    prefix: str
    ignored: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.service.resolve(self.fields.get("model"))
        self.seed = seed_of(self.fields)
        self.created = int(time.time())
        stated = self.fields.get("request_id")
        self.id = f"{self.prefix}-{stated or secrets.token_hex(12)}"
        self.owner: str = self.request.scope["owner"]
        self.usage = Usage()

    @classmethod
    def of(
        cls,
        service: Service,
        request: Request,
        table: FieldTable,
        body: Any,
        prefix: str,
        *,
        reports: bool = False,
    ) -> ApiCall:
        """Checks the body by the route's table.

        Args:
            reports: unknown fields are reported, whatever the operator chose.

        Raises:
            ApiError: with the field.
        """
        reports = reports or service.settings.reports_unknown_fields
        ignored: list[str] | None = [] if reports else None
        fields = table.parse(body, ignored=ignored)
        body.clear()  # what changes nothing need not stay while the request runs
        return cls(service, request, fields, prefix, ignored or [])

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        seed = {"x-rooflax-seed": str(self.seed)}
        if not self.ignored:
            return seed
        more = ["..."] if len(self.ignored) > MAX_IGNORED else []
        named = ", ".join([*self.ignored[:MAX_IGNORED], *more])
        return seed | {"x-rooflax-ignored": _NOT_PRINTABLE.sub("?", named)}

    @property
    def cache_salt(self) -> str:
        """Keys share no cached prompts, where there are several."""
        salt = self.fields.get("cache_salt", "")
        return f"{self.owner}:{salt}" if len(self.service.settings.api_keys) > 1 else salt

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every object of the answer has."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    def timed(self) -> dict[str, Any]:
        """Fields that timings_per_token adds to every object of the response."""
        return {"timings": self.usage.timings()} if self.fields.get("timings_per_token") else {}

    def stream_option(self, name: str) -> bool:
        """Value of one of stream_options.

        Raises:
            ApiError: there are some without a stream.
        """
        options = self.fields.get("stream_options")
        if options is not None and not self.is_streamed:
            raise ApiError(
                "stream_options is given without stream; say stream: true, or drop it.",
                param="stream_options",
            )
        return bool((options or {}).get(name))

    async def answered(self, answer: Any, failed: Any) -> Response:
        """The whole or streamed answer of OpenAI's older APIs, by `stream_options`."""
        has_usage = self.stream_option("include_usage")
        if not self.is_streamed:
            return await self.whole(answer.whole())
        has_usage_each = self.stream_option("continuous_usage_stats")
        return self.events(answer.stream(has_usage, has_usage_each), failed)

    async def whole(self, answer: Any) -> Json:
        """The answer as one document, as long as the client is there."""
        async with asyncio.timeout(self.service.settings.request_s):
            document = await while_connected(self.request, answer)
        return Json(document, headers=self.headers)

    def events(self, pieces: AsyncGenerator[bytes, None], failed: Any) -> Events:
        """The answer as a stream."""
        return Events(pieces, failed, self.headers, self.service.settings.request_s)


async def completions_of(deltas: AsyncGenerator[Delta, None], usage: Usage) -> list[Completion]:
    """All samples, by prompt and index.

    Raises:
        EngineError: the engine was shut down meanwhile.
    """
    done: dict[tuple[int, int], Completion] = {}
    async with aclosing(deltas) as stream:
        async for delta in stream:
            usage.count(delta)
            if delta.completion is not None:
                check_finished(delta.completion)
                done[delta.prompt, delta.index] = delta.completion
    return [done[key] for key in sorted(done)]


def check_finished(completion: Completion) -> None:
    """
    Raises:
        ApiError: it ended because the server stops.
        EngineError: it failed.
    """
    if completion.finish_reason == "abort":
        raise ApiError("The server stopped before the answer ended.", status=503, code="draining")
    if completion.finish_reason == "error":
        raise EngineError(completion.error or "the request failed")


def token_ids(
    fields: Mapping[str, Any], tokens: Sequence[int], prompt: Sequence[int]
) -> dict[str, Any]:
    """Fields that return_token_ids adds to a choice."""
    if not fields.get("return_token_ids"):
        return {}
    return {"token_ids": list(tokens), "prompt_token_ids": list(prompt)}
