"""`ChatTurn`: the answers to one conversation, piece by piece, for every chat-like API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from rooflax.completion import Delta
from rooflax.server.call import ApiCall, check_finished
from rooflax.server.errors import ApiError
from rooflax.server.grammars import Thinks, behind_reasoning
from rooflax.server.open_call import Event
from rooflax.server.reader import Reader, Reading
from rooflax.server.rendering import ChatPrompt, render
from rooflax.server.sampling import form_field, form_of, sampling_params
from rooflax.server.tools import new_call_id


class Spelled(NamedTuple):
    """A token as log-probabilities state it.

    Attributes:
        begin, end: its characters of the whole answer.
    """

    entry: dict[str, Any]
    begin: int
    end: int

    def within(self, begin: int, end: int) -> Spelled | None:
        """The part of it that lies between two places; None where there is none."""
        first, last = max(begin, self.begin), min(end, self.end)
        text = self.entry["token"]
        if first >= last:
            return None
        if (first, last) == (self.begin, self.end):
            return self
        if len(text) == self.end - self.begin:  # else it is no text of its own
            text = text[first - self.begin : last - self.begin]
        return Spelled(self.entry | {"token": text, "bytes": list(text.encode())}, first, last)


@dataclass(frozen=True)
class Piece:
    """Part of one sample since the last one.

    Attributes:
        events: text, reasoning and calls, in their order.
        tokens: those of which the text is certain, if log-probabilities are asked for; not the one
            that ended the answer, nor what a stop string has cut.
        finish_reason: "stop", "length" or "tool_calls" on the last piece.
    """

    index: int
    events: list[Event]
    tokens: list[Spelled]
    delta: Delta
    finish_reason: str | None


class ChatTurn:
    """One conversation's samples.

    Args:
        fields: as /v1/chat/completions has them; those of other APIs are converted to these.
        most_field: the API's own name of max_tokens.

    Attributes:
        prompt: once the pieces have begun.
    """

    def __init__(self, call: ApiCall, fields: Mapping[str, Any], most_field: str | None = None):
        self.call, self.fields = call, fields
        self.num_samples: int = fields.get("n", 1)
        self.prompt: ChatPrompt | None = None
        self._waiting: dict[int, list[Spelled]] = defaultdict(list)
        self._most = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        self._most_field = most_field or self._most
        top = fields.get("top_logprobs")
        if top is not None and not fields.get("logprobs"):
            raise ApiError(
                "top_logprobs is given without logprobs; say logprobs: true.", param="top_logprobs"
            )
        self._logprobs = (top or 0) if fields.get("logprobs") else None
        self._form = form_of(fields)

    def call_id(self, event: Event, prefix: str = "call_") -> str:
        """The model's own id, or a new one of the template's kind."""
        if event.id:
            return event.id
        calls = self.prompt and self.prompt.format.calls
        return new_call_id(calls.id_length if calls else 0, prefix)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All samples' pieces as they come; closing it ends them.

        Raises:
            RooflaxError: the request cannot be done, or failed.
        """
        call, service = self.call, self.call.service
        with service.reserved(self.num_samples, call.owner):
            llm = service.ready().llm
            if llm.info.pooling is not None:
                raise ApiError(
                    f"{llm.info.name} embeds texts or scores them; it writes none.",
                    param="messages",
                )
            prompt, tokenizer = await render(service, self.fields), llm.tokenizer
            self.prompt = prompt
            max_tokens = self.fields.get(self._most)
            service.check_length(len(prompt.ids), max_tokens, self._most_field)
            thinks = prompt.thinks(tokenizer.decode)
            params = sampling_params(
                self.fields,
                call.seed,
                await self._grammars(prompt, thinks),
                max_tokens=max_tokens,
                logprobs=self._logprobs,
            )
            call.usage.prompt_tokens = len(prompt.ids)

            async with service.stream(
                [prompt.ids],
                params,
                owner=call.owner,
                model=call.model,
                cache_salt=call.cache_salt,
                decoders=lambda _: Reader(
                    tokenizer,
                    prompt.format,
                    prompt.ids,
                    reads_calls=bool(prompt.choice.tools),
                    schemas=prompt.choice.schemas,
                ),
                form_field=form_field(self.fields) if self._form else "tools",
            ) as deltas:
                async for delta in deltas:
                    yield self._piece(delta)

    def _piece(self, delta: Delta) -> Piece:
        reading: Reading = delta.reading
        usage = self.call.usage
        usage.count(delta)
        reason = None
        if delta.completion is not None:
            check_finished(delta.completion)
            reason = delta.completion.finish_reason
            if reason == "stop" and reading.num_calls:
                reason = "tool_calls"
            usage.reasoning_tokens += reading.num_reasoning_tokens
            self.call.service.failed_calls += reading.num_failed
        return Piece(delta.index, reading.events, self._spelled(delta, reading), delta, reason)

    def _spelled(self, delta: Delta, reading: Reading) -> list[Spelled]:
        """The tokens of which the text has become certain."""
        if self._logprobs is None or delta.logprobs is None:
            return []
        waiting = self._waiting[delta.index]
        spelling = self.call.service.spelling
        entries = spelling.chat(delta.tokens, delta.logprobs, self._logprobs)
        # Beyond the spans is a token that ended the answer.
        pairs = zip(entries, reading.spans, strict=False)
        waiting += [Spelled(entry, begin, end) for entry, (begin, end) in pairs]
        is_last, num_certain = delta.completion is not None, reading.num_certain
        certain = list(takewhile(lambda each: is_last or each.end <= num_certain, waiting))
        del waiting[: len(certain)]
        parts = [each.within(-1, num_certain) for each in certain]
        return [part for part in parts if part is not None]

    async def _grammars(self, prompt: ChatPrompt, thinks: Thinks) -> dict[str, Any]:
        service, choice = self.call.service, prompt.choice
        special, trials = service.special, choice.trials(service.special)
        fault_list = await service.faults(list(trials.values()))
        faults = dict(zip(trials, fault_list, strict=True))
        calls = choice.grammar(special, thinks, self._form, faults)
        if calls is not None:
            return {"grammar": calls}
        return behind_reasoning(self._form, prompt.format, special, thinks=thinks)
