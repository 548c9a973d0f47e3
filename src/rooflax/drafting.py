"""Draft settings of speculative decoding: n-grams of the text, or a smaller model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooflax.engine.engine import Engine
from rooflax.engine.features.draft_model import ModelDrafter
from rooflax.engine.features.speculation import NgramDrafter, Speculation
from rooflax.errors import RequestError
from rooflax.loading.tokenizer import Tokenizer


@dataclass(frozen=True)
class Drafting:
    """Draft settings, as `LLM(speculate=...)` gave them.

    Attributes:
        vocab_size: of the model that is drafted for.
        num_tokens: the most drafts of a sequence in a step.
        new_engine: of the smaller model, by slots and tokens; None drafts from the text so far.
        max_tokens: the longest context of the smaller model.
    """

    vocab_size: int
    num_tokens: int
    new_engine: Callable[[int, int], Engine] | None = None
    max_tokens: int = 0

    def for_engine(self, num_slots: int, max_tokens: int) -> Speculation:
        """Draft settings for an engine of this size."""
        if self.new_engine is None:
            return Speculation(NgramDrafter(), self.num_tokens)
        engine = self.new_engine(num_slots, min(max_tokens, self.max_tokens))
        return Speculation(ModelDrafter(engine, self.vocab_size), self.num_tokens)


def check_same_tokens(
    name: str, tokenizer: Tokenizer, draft_name: str, draft_tokenizer: Tokenizer
) -> None:
    """
    Raises:
        RequestError: the draft's ids mean something else.
    """
    mine, theirs = (t.backend.get_vocab() for t in (tokenizer, draft_tokenizer))
    if mine != theirs:
        differ = sum(theirs.get(token) != number for token, number in mine.items())
        raise RequestError(
            f"{draft_name} cannot draft for {name}: of {len(mine)} tokens {differ} have another "
            f"id there, or none; take a model of the same tokenizer."
        )
