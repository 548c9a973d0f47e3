"""POST /v1/chat/completions: create a chat completion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rooflax.server.answers import DONE, event
from rooflax.server.call import ApiCall, token_ids
from rooflax.server.completions import failed
from rooflax.server.open_call import Event
from rooflax.server.service import Service
from rooflax.server.tables import CHAT
from rooflax.server.turn import ChatTurn, Piece, Spelled


async def chat(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/chat/completions: create a chat completion."""
    call = ApiCall.of(service, request, CHAT, body, "chatcmpl")
    return await call.answered(_ChatAnswer(call), failed)


@dataclass
class _Whole:
    """One sample, as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spelled: list[Spelled] = field(default_factory=list)
    last: Piece | None = None


class _ChatAnswer:
    def __init__(self, call: ApiCall):
        self.call = call
        self.turn = ChatTurn(call, call.fields)
        self.spelling = call.service.spelling
        field_of = call.service.settings.reasoning_field
        names = ("reasoning_content", "reasoning") if field_of == "both" else (field_of,)
        self.reasoning_names = names if call.fields.get("include_reasoning", True) else ()

    def _logprobs(self, tokens: list[Spelled]) -> dict[str, Any] | None:
        if not self.call.fields.get("logprobs"):
            return None
        return {"content": [each.entry for each in tokens], "refusal": None}

    async def whole(self) -> dict[str, Any]:
        """The answer as one document."""
        samples: dict[int, _Whole] = defaultdict(_Whole)
        async with aclosing(self.turn.pieces()) as pieces:
            async for piece in pieces:
                sample = samples[piece.index]
                for each in piece.events:
                    self._gather(sample, each)
                sample.tokens += piece.delta.tokens
                sample.spelled += piece.tokens
                sample.last = piece
        choices = [self._choice(index, samples[index]) for index in sorted(samples)]
        fields = {"choices": choices, "usage": self.call.usage.openai()}
        return self.call.head("chat.completion") | fields | self.call.timed()

    def _gather(self, sample: _Whole, each: Event) -> None:
        if each.kind == "content":
            sample.content += each.text
        elif each.kind == "reasoning":
            sample.reasoning += each.text
        elif each.kind == "call":
            function = {"name": each.text, "arguments": ""}
            sample.calls.append(
                {"id": self.turn.call_id(each), "type": "function", "function": function}
            )
        elif each.kind == "arguments":
            sample.calls[-1]["function"]["arguments"] += each.text

    def _choice(self, index: int, sample: _Whole) -> dict[str, Any]:
        assert sample.last is not None
        completion = sample.last.delta.completion
        assert completion is not None
        is_empty = not sample.content and bool(sample.calls or sample.reasoning)
        message: dict[str, Any] = {
            "role": "assistant", "content": None if is_empty else sample.content, "refusal": None,
        }  # fmt: skip
        if sample.reasoning:
            message |= dict.fromkeys(self.reasoning_names, sample.reasoning)
        if sample.calls:
            message["tool_calls"] = sample.calls
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sample.spelled),
            "finish_reason": sample.last.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.spelling.prompt(
                completion.prompt_tokens, completion.prompt_logprobs
            )
        return choice | token_ids(self.call.fields, sample.tokens, completion.prompt_tokens)

    async def stream(self, has_usage: bool, has_usage_each: bool) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        usage = self.call.usage
        head: dict[str, Any] = self.call.head("chat.completion.chunk")
        num_calls: dict[int, int] = {}

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            stated = {"usage": usage.openai() if has_usage_each else None}
            document = head | {"choices": [choice | more]}
            document |= (stated if has_usage or has_usage_each else {}) | self.call.timed()
            return event(document)

        async with aclosing(self.turn.pieces()) as pieces:
            async for piece in pieces:
                if piece.index not in num_calls:
                    num_calls[piece.index] = 0
                    yield chunk(piece.index, {"role": "assistant", "content": ""})
                more = self._of_tokens(piece)
                for delta in self._deltas(piece, num_calls):
                    yield chunk(piece.index, delta, **more)
                    more = {}
                if more:
                    yield chunk(piece.index, {}, **more)
                if piece.finish_reason is not None:
                    yield self._last(piece, chunk)
        if has_usage:
            yield event(head | {"choices": [], "usage": usage.openai()} | self.call.timed())
        yield DONE

    def _of_tokens(self, piece: Piece) -> dict[str, Any]:
        """Fields of a chunk that describe its tokens."""
        more: dict[str, Any] = {}
        if piece.tokens:
            more["logprobs"] = self._logprobs(piece.tokens)
        if self.call.fields.get("return_token_ids") and piece.delta.tokens:
            more["token_ids"] = list(piece.delta.tokens)
        return more

    def _deltas(self, piece: Piece, num_calls: dict[int, int]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        names = {"content": ("content",), "reasoning": self.reasoning_names}
        for kind, events in groupby(piece.events, key=attrgetter("kind")):
            if kind in names:
                text = "".join(each.text for each in events)
                deltas.append(dict.fromkeys(names[kind], text))
                continue
            for each in events:
                if kind == "call":
                    num_calls[piece.index] += 1
                    function = {"name": each.text, "arguments": ""}
                    one = {"id": self.turn.call_id(each), "type": "function"}
                elif kind == "arguments":
                    function, one = {"arguments": each.text}, {}
                else:
                    continue
                one = {"index": num_calls[piece.index] - 1} | one | {"function": function}
                deltas.append({"tool_calls": [one]})
        return [each for each in deltas if each]

    def _last(self, piece: Piece, chunk: Any) -> bytes:
        completion = piece.delta.completion
        assert completion is not None
        more: dict[str, Any] = {
            "finish_reason": piece.finish_reason, "stop_reason": completion.stop_reason,
        }  # fmt: skip
        if completion.prompt_logprobs is not None:
            more["prompt_logprobs"] = self.spelling.prompt(
                completion.prompt_tokens, completion.prompt_logprobs
            )
        return chunk(piece.index, {}, **more)
