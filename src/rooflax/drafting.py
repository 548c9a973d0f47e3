"""Who drafts tokens for a model: the text so far, or a smaller model with the same tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooflax.engine.draft_model import ModelDrafter
from rooflax.engine.speculation import DEFAULT_DRAFT_TOKENS, NgramDrafter, Speculation
from rooflax.errors import RequestError

if TYPE_CHECKING:
    from rooflax.llm import LLM

NGRAM = "ngram"


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


def _check_fits(target: LLM, draft: LLM) -> None:
    mine, theirs = (llm.tokenizer.backend.get_vocab() for llm in (target, draft))
    if mine != theirs:
        differ = sum(theirs.get(token) != number for token, number in mine.items())
        raise RequestError(
            f"{draft.about.name} cannot draft for {target.about.name}: of {len(mine)} tokens "
            f"{differ} have another id there, or none; take a model of the same tokenizer."
        )
