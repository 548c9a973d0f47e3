"""Inputs of `LLM` and `AsyncLLM`: prompts, conversations and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError, did_you_mean
from rooflax.fields.kinds import is_whole
from rooflax.fields.sampling import SAMPLING

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

FIELDS = list(SAMPLING)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of one prompt or several.

    Raises:
        RequestError: it is neither text, nor token ids, nor a list of either.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise RequestError(
            f"The prompt is {prompts!r:.80}; it must be text or a list of token ids.",
            param="prompt",
        )
    items = list(prompts)
    if items and all(is_whole(item) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """A list of conversations, of one or several.

    Raises:
        RequestError: it is neither a list of messages nor a list of such lists.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        if all(isinstance(item, Mapping) for item in messages):
            return [messages]  # type: ignore[list-item]
        if all(isinstance(item, Sequence) and not isinstance(item, str) for item in messages):
            return list(messages)  # type: ignore[arg-type]
    raise RequestError(
        f"messages is {messages!r:.80}; it must be a list of dicts with role and content, or a "
        f"list of such lists.",
        param="messages",
    )


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    changes: Mapping[str, Any],
) -> list[SamplingParams]:
    """`count` sampling parameters.

    Args:
        params: one for all, or one per prompt; None is unset ones.
        changes: fields that replace theirs.

    Raises:
        RequestError: another type, another number of them, an unknown field, or a wrong value.
    """
    for name in changes:
        if name not in FIELDS:
            meant = did_you_mean(name, (*FIELDS, "params"))
            raise RequestError(f"There is no sampling parameter {name!r}{meant}.", param=name)
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [replace(params, **changes) if changes else params] * count
    several = isinstance(params, Sequence) and not isinstance(params, str)
    if not several or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError(
            f"params is {params!r:.80}; it must be SamplingParams, or one for each prompt; single "
            f"fields are given by name, as in temperature=0.5.",
            param="params",
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one for each.", param="params"
        )
    return [replace(item, **changes) if changes else item for item in params]
