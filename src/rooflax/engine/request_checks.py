"""Checks of a request, shared by all front ends, before the queue.

What passes here cannot fail in a step: ids are the model's, counts and sums fit their columns.
Pure Python, no jax.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence
from rooflax.errors import RequestError
from rooflax.fields.sampling import MAX_STOP_IDS

MAX_SALT_BYTES = 4096


def check_sequence(sequence: Sequence, vocab_size: int, max_tokens: int) -> None:
    """Rejects a sequence that cannot run.

    Args:
        max_tokens: that the context holds.

    Raises:
        RequestError: with the field and the number.
    """
    check_prompt(sequence.prompt_tokens, vocab_size, max_tokens)
    check_params(sequence.params, vocab_size)
    check_salt(sequence.kv.cache_salt)
    params = sequence.params
    if params.min_tokens > sequence.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens} and the text may have {sequence.max_tokens} tokens "
            f"after a prompt of {sequence.num_prompt_tokens}; lower it.",
            param="min_tokens",
        )
    if params.min_tokens and len(sequence.stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"min_tokens needs at most {MAX_STOP_IDS} ids that end the text, and there are "
            f"{len(sequence.stop_ids)}.",
            param="min_tokens",
        )
    if params.num_beams > 1 and len(sequence.schedule.siblings) == 1:
        raise RequestError(
            f"num_beams is {params.num_beams} and there is no beam search.", param="num_beams"
        )
    if params.structured_output is not None and sequence.sampler.constraint is None:
        raise RequestError("A grammar was asked for and there is no structured output.")
    _check_known("stop_token_ids", "A stop id is", sequence.stop_ids, vocab_size)


def check_prompt(
    prompt_tokens: Seq[int], vocab_size: int, max_tokens: int, *, new_tokens: int = 1
) -> None:
    """Rejects a prompt that cannot run.

    Args:
        max_tokens: that the context holds.
        new_tokens: that must have room behind it.

    Raises:
        RequestError: with both numbers.
    """
    if not prompt_tokens:
        raise RequestError("The prompt has no tokens; give at least one.", param="prompt")
    highest, lowest = max(prompt_tokens), min(prompt_tokens)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise RequestError(
            f"The prompt holds the token id {wrong}; this model knows 0 to {vocab_size - 1}.",
            param="prompt",
        )
    check_length(len(prompt_tokens), max_tokens, new_tokens=new_tokens)


def check_length(num_tokens: int, max_tokens: int, *, new_tokens: int = 1) -> None:
    """Rejects a prompt that is too long; as `check_prompt`.

    Raises:
        RequestError: with both numbers.
    """
    if num_tokens + new_tokens > max_tokens:
        why = ", which leaves no room for a new one" if new_tokens else ""
        raise RequestError(
            f"The prompt has {num_tokens} tokens and the context holds {max_tokens}{why}; shorten "
            f"the prompt, or raise max_model_len as far as the model goes.",
            param="prompt",
        )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Rejects token ids that the model does not have, and more log-probabilities than ids.

    Raises:
        RequestError: with the field and the number.
    """
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        ids = getattr(params, name)
        _check_known(name, f"{name} names the token id", ids, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab_size:
            raise RequestError(
                f"{name} is {wanted} and this model has {vocab_size} token ids.", param=name
            )


def check_salt(cache_salt: object) -> None:
    """
    Raises:
        RequestError: the salt is no text, or too long.
    """
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt is {cache_salt!r}; it must be text.", param="cache_salt")
    try:
        size = len(cache_salt.encode())
    except UnicodeEncodeError:
        raise RequestError(
            "cache_salt holds half a surrogate pair, which is no text.", param="cache_salt"
        ) from None
    if size > MAX_SALT_BYTES:
        raise RequestError(
            f"cache_salt has {size} bytes and may have {MAX_SALT_BYTES}.", param="cache_salt"
        )


def _check_known(
    name: str, what: str, ids: Seq[int] | frozenset[int] | dict, vocab_size: int
) -> None:
    highest, lowest = max(ids, default=0), min(ids, default=0)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise RequestError(f"{what} {wrong}; this model knows 0 to {vocab_size - 1}.", param=name)
