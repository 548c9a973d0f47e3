"""`Turn`: an assistant's answers to one conversation, piece by piece, for every chat-like API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rooflax.completion import Delta
from rooflax.server.call import Call, check_finished
from rooflax.server.errors import ApiError
from rooflax.server.grammars import Thinks, behind_reasoning
from rooflax.server.reader import Event, Reader
from rooflax.server.rendering import Prompt, render
from rooflax.server.sampling import form_field, form_of, sampling_params
from rooflax.server.tools import call_id


@dataclass(frozen=True)
class Piece:
    """What one sample went on with.

    Attributes:
        events: reasoning and calls.
        content: text.
        finish_reason: "stop", "length" or "tool_calls" on the last piece.
    """

    index: int
    events: list[Event]
    content: str
    delta: Delta
    finish_reason: str | None

    def parts(self) -> Iterator[tuple[str, str]]:
        """Its kinds and texts in their order: reasoning, content, then calls."""
        yield from ((each.kind, each.text) for each in self.events if each.kind == "reasoning")
        if self.content:
            yield "content", self.content
        yield from ((each.kind, each.text) for each in self.events if each.kind != "reasoning")


class Turn:
    """One conversation's samples.

    Args:
        found: fields as /v1/chat/completions has them; those of other APIs are turned into these.
        most_field: the API's own name of max_tokens.

    Attributes:
        prompt: once the pieces have begun.
    """

    def __init__(self, call: Call, found: Mapping[str, Any], most_field: str | None = None):
        self.call, self.found = call, found
        self.num_samples: int = found.get("n", 1)
        self.prompt: Prompt | None = None
        self._readers: dict[int, Reader] = {}
        self._most = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
        self._most_field = most_field or self._most
        top = found.get("top_logprobs")
        if top is not None and not found.get("logprobs"):
            raise ApiError(
                "top_logprobs is given without logprobs; say logprobs: true.", param="top_logprobs"
            )
        self._logprobs = (top or 0) if found.get("logprobs") else None
        self._form = form_of(found)

    def new_call_id(self, prefix: str = "call_") -> str:
        """Of the kind that the model's template wants."""
        calls = self.prompt and self.prompt.format and self.prompt.format.calls
        return call_id(calls.id_length if calls else 0, prefix)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All samples' pieces as they come; closing it ends them.

        Raises:
            RooflaxError: the request cannot be done, or failed.
        """
        call, service = self.call, self.call.service
        with service.reserved(self.num_samples, call.owner):
            prompt = self.prompt = await render(service, self.found)
            tokenizer = service.ready().llm.tokenizer
            max_tokens = self.found.get(self._most)
            service.check_length(len(prompt.ids), max_tokens, self._most_field)
            thinks = prompt.thinks(tokenizer.decode)
            params = sampling_params(
                self.found,
                call.seed,
                self._grammars(prompt, thinks),
                max_tokens=max_tokens,
                logprobs=self._logprobs,
            )
            call.usage.prompt_tokens = len(prompt.ids)

            def reader(index: int) -> Reader:
                found = self._readers[index] = Reader(
                    tokenizer,
                    prompt.format,
                    prompt.ids,
                    reads_calls=bool(prompt.choice.tools),
                    schemas=prompt.choice.schemas,
                )
                return found

            stream = service.stream(
                [prompt.ids],
                params,
                cache_salt=call.cache_salt,
                decoders=reader,
                form_field=form_field(self.found) if self._form else "tools",
            )
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield self._piece(delta)

    def _piece(self, delta: Delta) -> Piece:
        reader, usage = self._readers[delta.index], self.call.usage
        usage.count(delta)
        reason = None
        if delta.completion is not None:
            check_finished(delta.completion)
            reason = delta.completion.finish_reason
            if reason == "stop" and reader.num_calls:
                reason = "tool_calls"
            usage.reasoning_tokens += reader.num_reasoning_tokens
            self.call.service.failed_calls += reader.num_failed
        return Piece(delta.index, reader.take_events(), delta.text, delta, reason)

    def _grammars(self, prompt: Prompt, thinks: Thinks) -> dict[str, Any]:
        special = self.call.service.special
        forced = prompt.choice.grammar(special, thinks)
        if forced is not None and self._form:
            raise ApiError(
                "response_format and structured_outputs do not go with calls that are forced or "
                "strict; drop one.",
                param="response_format",
            )
        if forced is not None:
            return {"grammar": forced}
        return behind_reasoning(self._form, prompt.format, special, thinks=thinks)
