"""`ModelDrafter`: a smaller model drafts tokens.

It is an engine of its own, asked for a few tokens of every sequence at each step. What it has
computed of them before, its prefix cache keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from rooflax.engine.buckets import SMALLEST_STEP, bucket
from rooflax.engine.engine import Engine
from rooflax.engine.features.speculation import Drafter
from rooflax.engine.runner import Compiled
from rooflax.engine.sequence import KVState, Sequence
from rooflax.errors import EngineError
from rooflax.ops.accelerator import block_size


class ModelDrafter(Drafter):
    """Draws drafts as the sequence's own parameters say, by the same noise.

    Args:
        engine: of the smaller model, with a slot for every sequence, used for drafts only.
        vocab_size: of the model that is drafted for; ids beyond it are never proposed.
    """

    def __init__(self, engine: Engine, vocab_size: int):
        self.engine, self._vocab_size = engine, vocab_size
        self.num_bytes = engine.model.weights_bytes + engine.kv_cache_bytes

    def propose(self, sequences: Seq[Sequence], num_tokens: int) -> list[list[int]]:
        guesses = {id(s): _shadow(s, num_tokens) for s in sequences if self._fits(s, num_tokens)}
        self.engine.add(list(guesses.values()), is_checked=True)
        while self.engine.has_unfinished:
            try:
                self.engine.step()
            except EngineError as error:  # memory: the larger engine knows what to lower
                raise error.__cause__ or error from None
        return [
            self._known(guesses[id(s)].tokens[s.num_tokens :]) if id(s) in guesses else []
            for s in sequences
        ]

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the smaller model has room for the sequence, and its ids."""
        if sequence.num_tokens + num_tokens > self.engine.config.max_model_len:
            return False
        vocab_size = self.engine.model.config.vocab_size
        return vocab_size >= self._vocab_size or max(sequence.tokens) < vocab_size

    def _known(self, tokens: list[int]) -> list[int]:
        """Up to the first id that the larger model does not have."""
        for index, token in enumerate(tokens):
            if token >= self._vocab_size:
                return tokens[:index]
        return tokens

    def warm_up(self, report: Callable[[Compiled], None], num_tokens: int) -> list[Compiled]:
        """Few shapes: prompts, and for all sequences what came since the last step, with the part
        of a block that was not full by then."""
        engine = self.engine
        if engine.runner.is_fully_warm or not engine.config.options.jit:
            return []
        new = engine.config.max_num_seqs * bucket(block_size() + num_tokens, SMALLEST_STEP)
        buckets = engine.server_buckets()
        tokens = tuple(sorted({min(new, buckets.tokens[-1]), buckets.tokens[-1]}))
        buckets = replace(buckets, decode_rows=(engine.config.max_num_seqs,), tokens=tokens)
        return engine.runner.warm_up_all(buckets, report, scores=False)

    def reset(self) -> None:
        self.engine.forget_all()
        self.engine.reset()


def _shadow(sequence: Sequence, num_tokens: int) -> Sequence:
    """Copies the sequence, to draft a few tokens."""
    shadow = Sequence(
        sequence.request_id,
        sequence.prompt_tokens,
        replace(sequence.params, logprobs=None, prompt_logprobs=None),
        sequence.num_output_tokens + num_tokens,
        frozenset(),
        sequence.sample_index,
        kv=KVState(sequence.kv.cache_salt),
    )
    shadow.tokens = list(sequence.tokens)
    return shadow
