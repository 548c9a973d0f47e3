"""Sampling fields of a request as `SamplingParams`, and log-probabilities as APIs write them."""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import TokenLogprobs
from rooflax.errors import RequestError, UnsupportedModelError
from rooflax.fields.declaration import COMPLETIONS, Api
from rooflax.fields.sampling import FORMS, SAMPLING
from rooflax.loading.incremental import spelled_bytes
from rooflax.server.errors import ApiError
from rooflax.server.fields import one_of

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

LOWEST = -9999.0
"""Number in place of minus infinity, which JSON does not have."""


def renamed(fields: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """An API's fields of sampling by their names here, but for those that its route computes."""
    return {
        one.name: fields[http.name or one.name]
        for one in SAMPLING.values()
        for http in one.http_of(api)
        if not http.is_computed and (http.name or one.name) in fields
    }


def seed_of(fields: Mapping[str, Any]) -> int:
    """The engine's seed: 32 bits of the request's, or new ones."""
    seed = fields.get("seed")
    if seed is None:
        return secrets.randbits(32)
    return seed if 0 <= seed < 2**32 else (seed ^ (seed >> 32)) & 0xFFFF_FFFF


def sampling_params(
    fields: Mapping[str, Any], seed: int, form: Mapping[str, Any], **further: Any
) -> SamplingParams:
    """
    Args:
        fields: named as completions and chats name them.
        form: json_schema, regex or grammar.
        further: fields that the route computes.

    Raises:
        ApiError: with the field.
    """
    values = renamed(fields, COMPLETIONS)
    if "top_k" in fields:
        values["top_k"] = max(0, fields["top_k"])
    if not fields.get("use_beam_search"):
        values["seed"] = seed
    try:
        return SamplingParams(**values | dict(form) | further)
    except RequestError as error:
        if error.param in FORMS:
            message = str(error)
            raise ApiError(message, code="invalid_schema", param=form_field(fields)) from None
        raise ApiError(str(error), param=error.param) from None


def form_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Grammar constraint, as one field of SamplingParams; empty if the text is free.

    Raises:
        ApiError: it is asked for twice, or of no known kind.
    """
    wanted = fields.get("response_format", {"type": "text"})
    kind = wanted["type"]
    one_of("response_format.type", kind, ("text", "json_object", "json_schema"))
    form: dict[str, Any] = {}
    if kind == "json_object":
        form = {"json_schema": {"type": "object"}}
    elif kind == "json_schema":
        if "json_schema" not in wanted:
            raise ApiError(
                "response_format.json_schema is missing; give a name and a schema.",
                param="response_format.json_schema",
            )
        form = {"json_schema": wanted["json_schema"]["schema"]}
    structured = fields.get("structured_outputs")
    if structured is None:
        return form
    if form or len(structured) != 1:
        raise ApiError(
            "structured_outputs takes one of json, regex, grammar and choice, and no "
            "response_format beside it.",
            param="structured_outputs",
        )
    ((name, value),) = structured.items()
    if name == "choice":
        literals = " | ".join(json.dumps(item, ensure_ascii=False) for item in value)
        return {"grammar": f"start: {literals}"}
    return {"json_schema" if name == "json" else name: value}


def form_field(fields: Mapping[str, Any]) -> str:
    """The field that says what the text must look like."""
    return "structured_outputs" if "structured_outputs" in fields else "response_format"


class Place:
    """A place in a text whose tokens may be parts of characters."""

    def __init__(self, at: int = 0):
        self._at, self._utf8 = at, codecs.getincrementaldecoder("utf-8")("replace")

    def go_on(self, spelled: bytes) -> int:
        """Position where a token begins; for a part of a character, where that begins."""
        begun = self._at
        self._at += len(self._utf8.decode(spelled))
        return begun


class Spelling:
    """Text of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        try:
            self._bytes: list[bytes] = spelled_bytes(tokenizer)
        except UnsupportedModelError:  # tokens of such a vocabulary spell no bytes by themselves
            self._bytes = []

    def spelled(self, token: int) -> bytes:
        """The bytes of one token."""
        if token < len(self._bytes):
            return self._bytes[token]
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def text(self, token: int) -> str:
        """The same as text; bytes that are no character by themselves become U+FFFD."""
        return self.spelled(token).decode("utf-8", "replace")

    def chat(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
    ) -> list[dict[str, Any]]:
        """As chat completions write them."""
        return [
            self._one(token, logprob.logprob)
            | {"top_logprobs": [self._one(*each) for each in logprob.top[:top]]}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.spelled(token)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], place: Place
    ) -> dict[str, Any]:
        """As completions write them.

        Args:
            logprobs: None for a prompt's first token, which has none.
            place: of the first token in the text; it moves to behind the last one.
        """
        return {
            "tokens": [self.text(token) for token in tokens],
            "token_logprobs": [one and max(one.logprob, LOWEST) for one in logprobs],
            "top_logprobs": [
                one and self._best(token, one) for token, one in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": [place.go_on(self.spelled(token)) for token in tokens],
        }

    def _best(self, token: int, entry: TokenLogprobs) -> dict[str, float]:
        # The chosen token comes last: of two tokens that look alike its value stays.
        pairs = [*reversed(entry.top), (token, entry.logprob)]
        return {self.text(other): max(logprob, LOWEST) for other, logprob in pairs}

    def prompt(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any] | None]:
        """A prompt's, as vLLM writes them: per token a map from token ids."""
        entries: list[dict[str, Any] | None] = [None]
        for token, one in zip(tokens[1:], logprobs, strict=True):
            pairs = {token: one.logprob} | dict(one.top)
            entries.append(
                {
                    str(other): {"logprob": max(logprob, LOWEST), "decoded_token": self.text(other)}
                    for other, logprob in pairs.items()
                }
            )
        return entries
