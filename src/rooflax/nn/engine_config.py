"""`EngineConfig`: how an engine runs, resolved once and passed whole. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import MOST_DECODE_STEPS, most_new_tokens
from rooflax.nn.pooler import Pooler

Config = TypeVar("Config", bound="EngineConfig")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, its runner and its scheduler.

    Attributes:
        options: with `layers` as the model has them.
        kv_dtype: of the KV cache.
        max_num_seqs: sequences that run at once.
        max_model_len: longest context in tokens, prompt included.
        prefill_chunk: most tokens of one prompt in a step; 0 is the platform's.
        max_tokens_per_step: most tokens of a step; 0 is the platform's prefill chunk, less where
            the sequences hold less, and at least one for each.
        step_s: a server's longest step; prompts are cut to what earlier steps show to fit. None is
            no limit.
        decode_steps: most decode steps of a dispatch; 0 is as the options say.
        burst_s: decode steps of about this time go into one dispatch, unless the options say how
            many: their tokens come together.
        num_draft_tokens: most drafts of a sequence in a step; 0 without drafts.
        num_blocks: of the KV cache, per layer group, block 0 included; () is enough for every
            sequence, always.
        prefix_caching: share the blocks of equal beginnings.
        isolates_faults: a step that fails is run again for each of its sequences apart, as a server
            needs it; otherwise `step` raises.
        mesh: jax.sharding.Mesh of the devices that share the model and its cache; None is one
            device, or devices that are not here.
        pooler: sequences end with their prompt and get a vector (`Sequence.vector`), no tokens.
        runs_whole: a prompt runs in one step, as tokens need that see those behind them.
    """

    options: ExecutionOptions
    max_num_seqs: int
    max_model_len: int
    kv_dtype: str = "float32"
    prefill_chunk: int = 0
    max_tokens_per_step: int = 0
    step_s: float | None = None
    decode_steps: int = 0
    burst_s: float = 0.15
    num_draft_tokens: int = 0
    num_blocks: tuple[int, ...] = ()
    prefix_caching: bool = True
    isolates_faults: bool = False
    mesh: Any = None
    pooler: Pooler | None = None
    runs_whole: bool = False

    @property
    def new_tokens(self) -> int:
        """The most tokens of a sequence that are written before its blocks are looked at again."""
        steps = self.decode_steps or self.options.decode_steps or MOST_DECODE_STEPS
        return most_new_tokens(self.prefill_chunk, steps, self.num_draft_tokens)

    def sized(self: Config, max_num_seqs: int, max_model_len: int, pooler: Pooler | None) -> Config:
        """The config of another engine of the same model, with blocks for all its sequences."""
        return replace(
            self,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_tokens_per_step=0,
            num_blocks=(),
            pooler=pooler,
        )

    def holds(self, max_num_seqs: int, max_model_len: int, pooler: Pooler | None) -> bool:
        """Whether an engine of this config does for one of that size."""
        fits = self.max_num_seqs == max_num_seqs and self.max_model_len >= max_model_len
        return fits and self.pooler == pooler

    def fitted(
        self: Config, *, is_causal: bool, prefill_chunk: int, num_draft_tokens: int
    ) -> Config:
        """The config of an engine of one model, with nothing left open.

        Args:
            is_causal: no token of the model sees those behind it.
            prefill_chunk: the platform's.
            num_draft_tokens: as the engine's drafter has it.
        """
        options, length, pooler = self.options, self.max_model_len, self.pooler
        assert pooler is not None or is_causal
        chunk, budget, step_s = self.prefill_chunk or prefill_chunk, self.max_tokens_per_step, None
        if is_causal:
            step_s = self.step_s
        else:
            chunk, budget = length, max(budget, length, prefill_chunk)
        # short prompts share a step, whatever the longest one is
        most = max(min(chunk, self.max_num_seqs * length), self.max_num_seqs)
        chunk = min(chunk, length) if options.use_cache else length
        steps = (options.decode_steps or MOST_DECODE_STEPS) if options.use_cache else 1
        if not options.use_cache:
            budget = self.max_num_seqs * length
        # a cached prefix has no hidden states, and has not seen what follows
        needs_all = not is_causal or (pooler is not None and pooler.needs_all)
        return replace(
            self,
            prefill_chunk=chunk,
            max_tokens_per_step=budget or most,
            step_s=step_s,
            decode_steps=steps if pooler is None else 1,
            num_draft_tokens=num_draft_tokens,
            prefix_caching=self.prefix_caching and options.use_cache and not needs_all,
            runs_whole=not is_causal,
        )
