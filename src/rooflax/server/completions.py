"""POST /v1/completions: create a text completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rooflax.completion import Completion, Delta
from rooflax.engine.sampling_params import SamplingParams
from rooflax.fields.sampling import DEFAULT_COMPLETION_TOKENS
from rooflax.server.answers import DONE, event
from rooflax.server.call import ApiCall, check_finished, completions_of, token_ids
from rooflax.server.errors import ApiError, openai_body
from rooflax.server.sampling import Place, form_field, form_of, sampling_params
from rooflax.server.service import Service
from rooflax.server.tables import COMPLETIONS, MAX_PROMPTS


async def completions(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/completions: create a text completion."""
    call = ApiCall.of(service, request, COMPLETIONS, body, "cmpl")
    prompts = _prompts(call.fields["prompt"])
    answer = _CompletionAnswer(call, prompts, await _params(call, len(prompts)))
    return await call.answered(answer, failed)


def failed(error: ApiError) -> bytes:
    """An error within a stream, as OpenAI's clients expect it."""
    return event(openai_body(error)) + DONE


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """
    Raises:
        ApiError: they are too many, empty, or of different kinds.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        prompts = [prompt]
    elif any(isinstance(item, int) for item in prompt):
        raise ApiError("prompt mixes token ids with other prompts.", param="prompt")
    else:
        prompts = prompt
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(
            f"There are {len(prompts)} prompts; at most {MAX_PROMPTS} are taken.", param="prompt"
        )
    if not all(prompts):
        raise ApiError("A prompt is empty; give at least one token.", param="prompt")
    return prompts


async def _params(call: ApiCall, num_prompts: int) -> SamplingParams:
    fields = call.fields
    max_tokens, echo = fields.get("max_tokens", DEFAULT_COMPLETION_TOKENS), fields.get("echo")
    samples, logprobs = fields.get("n", 1), fields.get("logprobs")
    if max_tokens == 0 and not echo:
        raise ApiError("max_tokens is 0 without echo; ask for a token.", param="max_tokens")
    if fields.get("best_of", samples) != samples:
        raise ApiError(
            f"best_of is {fields['best_of']} and n is {samples}; they must be equal.",
            code="unsupported_value",
            param="best_of",
        )
    if num_prompts * samples > MAX_PROMPTS:
        raise ApiError(
            f"{num_prompts} prompts with n {samples} are more than {MAX_PROMPTS} answers.",
            param="n",
        )
    further: dict[str, Any] = {"max_tokens": max(1, max_tokens), "logprobs": logprobs}
    if echo and logprobs is not None:
        further["prompt_logprobs"] = max(logprobs, fields.get("prompt_logprobs", 0))
    if fields.get("use_beam_search"):
        if samples < 2 or call.is_streamed:
            why = "is streamed" if call.is_streamed else "has n 1"
            raise ApiError(
                f"use_beam_search is for n from 2 up without stream, and the request {why}.",
                param="use_beam_search",
            )
        further["num_beams"] = samples
    return sampling_params(fields, call.seed, form_of(fields), **further)


@dataclass
class _CompletionAnswer:
    """Response with the samples of every prompt."""

    call: ApiCall
    prompts: list[str | list[int]]
    params: SamplingParams

    def __post_init__(self) -> None:
        fields, tokenizer = self.call.fields, self.call.service.ready().llm.tokenizer
        self.echoes = fields.get("echo", False)
        self.says_nothing = fields.get("max_tokens") == 0
        self.spelling = self.call.service.spelling
        self.decode = tokenizer.decode
        self.ids: list[list[int]] = []

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        call, fields = self.call, self.call.fields
        with call.service.reserved(len(self.prompts) * self.params.n, call.owner):
            self.ids = [
                await call.service.encode(
                    prompt, add_special_tokens=fields.get("add_special_tokens", True)
                )
                if isinstance(prompt, str)
                else prompt
                for prompt in self.prompts
            ]
            for ids in self.ids:
                call.service.check_length(len(ids), self.params.max_tokens, "max_tokens")
                call.usage.prompt_tokens += len(ids)
            async with call.service.stream(
                self.ids,
                self.params,
                owner=call.owner,
                model=call.model,
                cache_salt=call.cache_salt,
                form_field=form_field(fields),
            ) as deltas:
                async for delta in deltas:
                    yield delta

    async def whole(self) -> dict[str, Any]:
        """The answer as one document."""
        usage = self.call.usage
        completions = await completions_of(self._deltas(), usage)
        if self.says_nothing:
            usage.completion_tokens = 0
        choices = []
        for number, completion in enumerate(completions):
            prompt = number // self.params.n
            choices.append(self._choice(number, prompt, completion))
        fields = {"choices": choices, "usage": usage.openai()}
        return self.call.head("text_completion") | fields | self.call.timed()

    def _choice(self, number: int, prompt: int, completion: Completion) -> dict[str, Any]:
        head = self._echoed(prompt)
        tokens = () if self.says_nothing else completion.tokens
        choice: dict[str, Any] = {
            "index": number,
            "text": head if self.says_nothing else head + completion.text,
            "logprobs": self._logprobs(prompt, tokens, completion),
            "finish_reason": "length" if self.says_nothing else completion.finish_reason,
            "stop_reason": None if self.says_nothing else completion.stop_reason,
        }
        if "prompt_logprobs" in self.call.fields:
            choice["prompt_logprobs"] = self.spelling.prompt(
                self.ids[prompt], completion.prompt_logprobs or ()
            )
        return choice | token_ids(self.call.fields, tokens, self.ids[prompt])

    def _logprobs(self, prompt: int, tokens: Any, completion: Completion) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        logprobs = completion.logprobs[: len(tokens)]
        if not self.echoes:
            return self.spelling.completion(tokens, logprobs, Place())
        before = completion.prompt_logprobs or ()
        return self.spelling.completion(
            [*self.ids[prompt], *tokens], [None, *before, *logprobs], Place()
        )

    def _echoed(self, prompt: int) -> str:
        if not self.echoes:
            return ""
        stated = self.prompts[prompt]
        return stated if isinstance(stated, str) else self.decode(stated)

    async def stream(self, has_usage: bool, has_usage_each: bool) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        call, usage, n = self.call, self.call.usage, self.params.n
        head: dict[str, Any] = call.head("text_completion")
        places: dict[int, Place] = {}

        def chunk(choice: dict[str, Any]) -> bytes:
            stated = {"usage": usage.openai()} if has_usage_each else {"usage": None}
            more = (stated if has_usage or has_usage_each else {}) | call.timed()
            return event(head | {"choices": [choice]} | more)

        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                usage.count(delta)
                number = delta.prompt * n + delta.index
                if number not in places:
                    text = self._echoed(delta.prompt)
                    places[number] = Place()
                    if text:
                        yield chunk(self._echo_choice(number, text, delta, places[number]))
                choice = self._stream_choice(number, delta, places[number])
                has_more = choice["text"] or choice["logprobs"] or choice.get("token_ids")
                if has_more or delta.completion is not None:
                    yield chunk(choice)
        if has_usage:
            if self.says_nothing:
                usage.completion_tokens = 0
            yield event(head | {"choices": [], "usage": usage.openai()} | call.timed())
        yield DONE

    def _echo_choice(self, number: int, text: str, delta: Delta, place: Place) -> dict[str, Any]:
        choice = _piece(number, text)
        if self.params.logprobs is not None:
            before = delta.prompt_logprobs or ()
            choice["logprobs"] = self.spelling.completion(
                self.ids[delta.prompt], [None, *before], place
            )
        return choice

    def _stream_choice(self, number: int, delta: Delta, place: Place) -> dict[str, Any]:
        completion = delta.completion
        text, tokens = ("", ()) if self.says_nothing else (delta.text, delta.tokens)
        choice = _piece(number, text)
        if delta.logprobs and not self.says_nothing:
            choice["logprobs"] = self.spelling.completion(tokens, delta.logprobs, place)
        if self.call.fields.get("return_token_ids"):
            choice["token_ids"] = list(tokens)
        if completion is not None:
            check_finished(completion)
            choice["finish_reason"] = "length" if self.says_nothing else completion.finish_reason
            choice["stop_reason"] = None if self.says_nothing else completion.stop_reason
            if "prompt_logprobs" in self.call.fields:
                choice["prompt_logprobs"] = self.spelling.prompt(
                    self.ids[delta.prompt], completion.prompt_logprobs or ()
                )
        return choice


def _piece(number: int, text: str) -> dict[str, Any]:
    return {
        "index": number, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None,
    }  # fmt: skip
