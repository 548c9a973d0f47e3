"""Who drafts tokens for a model: the text so far, or a smaller model with the same tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooflax.engine.draft_model import ModelDrafter
from rooflax.engine.speculation import DEFAULT_DRAFT_TOKENS, NgramDrafter, Speculation
from rooflax.errors import RequestError

if TYPE_CHECKING:
    from rooflax.llm import LLM

NGRAM = "ngram"
MOST_DRAFT_TOKENS = 31


class Drafting:
    """What `LLM(speculate=...)` asked for.

    Args:
        target: the model that is drafted for.
        draft: the smaller model; None drafts from the text so far.
        num_tokens: the most drafts of a sequence in a step; None is what one product holds on CPU.

    Raises:
        RequestError: the two models do not fit together.
    """

    def __init__(self, target: LLM, draft: LLM | None, num_tokens: int | None):
        if draft is not None:
            _check_fits(target, draft)
        self._draft, self._vocab_size = draft, target.about.config.vocab_size
        self._num_tokens = num_tokens or DEFAULT_DRAFT_TOKENS

    def for_engine(self, num_slots: int, max_tokens: int) -> Speculation:
        """What an engine of this size needs."""
        if self._draft is None:
            return Speculation(NgramDrafter(), self._num_tokens)
        tokens = min(max_tokens, self._draft.max_model_len)
        engine = self._draft.new_engine(num_slots, tokens)
        return Speculation(ModelDrafter(engine, self._vocab_size), self._num_tokens)


def check_speculate(speculate: object, num_draft_tokens: int | None, use_cache: bool) -> None:
    """
    Raises:
        RequestError: the arguments have no meaning together.
    """
    if num_draft_tokens is not None:
        whole = isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool)
        if not whole or not 1 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
            raise RequestError(
                f"num_draft_tokens is {num_draft_tokens!r}; it must be a whole number from 1 to "
                f"{MOST_DRAFT_TOKENS}."
            )
        if speculate is None:
            raise RequestError(
                'num_draft_tokens is given and nobody drafts; add speculate="ngram" or a model.'
            )
    if speculate is not None and not use_cache:
        raise RequestError("Speculative decoding needs the cache, and it is off; drop one of them.")


def _check_fits(target: LLM, draft: LLM) -> None:
    mine, theirs = (llm.tokenizer.backend.get_vocab() for llm in (target, draft))
    if mine != theirs:
        differ = sum(theirs.get(token) != number for token, number in mine.items())
        raise RequestError(
            f"{draft.about.name} cannot draft for {target.about.name}: of {len(mine)} tokens "
            f"{differ} have another id there, or none; take a model of the same tokenizer."
        )
