"""`Runner`: turns a scheduled step into arrays of a bucketed shape and runs it.

It owns the device's state: the model, the KV cache, the penalties' counts. It chooses shapes; what
runs when is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rooflax.engine import packing
from rooflax.engine.packing import Layout, StepResult
from rooflax.engine.scheduler import ScheduledStep
from rooflax.engine.sequence import Sequence
from rooflax.engine.steps import StepFunctions, StepInput
from rooflax.models.model import Model
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import allocate
from rooflax.nn.layout import blocks_needed, ceil_div
from rooflax.nn.mesh import CACHE_SPEC
from rooflax.ops.sampling import TokenCounts

BLOCK_SIZE = 16
SMALLEST_CONTEXT = 256
"""Tokens; contexts are padded to this, or to a power of two above it."""
SMALLEST_PREFILL = 16


def bucket(n: int, smallest: int = 1) -> int:
    """The power of two times `smallest` that holds n."""
    size = smallest
    while size < n:
        size *= 2
    return size


class Runner:
    """Runs steps of up to `num_slots` rows and contexts of up to `max_tokens`."""

    def __init__(
        self,
        model: Model,
        options: ExecutionOptions,
        *,
        num_slots: int,
        max_tokens: int,
        prefill_chunk: int,
        decode_steps: int,
        kv_dtype: str,
        mesh: Mesh | None = None,
    ):
        self.model, self.options, self.mesh = model, options, mesh
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.prefill_chunk, self.decode_steps = prefill_chunk, decode_steps
        self.functions = StepFunctions(options, mesh, decode_steps)
        self.windows: tuple[int | None, ...] = model.config.groups.windows
        new_tokens = max(prefill_chunk, decode_steps)
        self.num_blocks = tuple(
            1 + num_slots * blocks_needed(window, max_tokens, new_tokens, BLOCK_SIZE)
            for window in self.windows
        )
        self.cache = self._allocate_cache(kv_dtype) if options.use_cache else None
        self.counts = self._empty_counts()
        self.prefill_seq = SMALLEST_PREFILL
        self._warm: set[tuple] = set()
        self._plain = True  # until a sequence wants more than the most likely token
        self._seated: list[Sequence | None] = [None] * num_slots
        self._params = packing.empty_params(num_slots + 1)
        self._device_params = self._put(self._params.copy())

    def _allocate_cache(self, kv_dtype: str) -> Any:
        config = self.model.config
        return allocate(
            config.groups,
            self.num_blocks,
            config.num_kv_heads,
            config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=kv_dtype,
            stacked=self.options.layers == "scan",
            sharding=None if self.mesh is None else NamedSharding(self.mesh, CACHE_SPEC),
        )

    def _empty_counts(self) -> TokenCounts:
        shape = (self.num_slots + 1, self.model.config.vocab_size)
        return self._put(TokenCounts(np.zeros(shape, bool), np.zeros(shape, np.int32)))  # type: ignore[arg-type]

    def _put(self, tree: Any) -> Any:
        """To every device, whole."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(tree, sharding)

    def run(self, step: ScheduledStep) -> StepResult:
        """Runs a step and waits for it; rows beyond the step's sequences are padding."""
        self._seat(step.sequences)
        return self._dispatch(step, *self.shape_of(step))

    def _dispatch(self, step: ScheduledStep, rows: int, seq: int, context: int) -> StepResult:
        function = self._function(step)
        host = self._inputs(step, rows, seq, context)
        packed, carry = function(self.model, (self.cache, self.counts), host)
        self.cache, self.counts = carry
        return StepResult(np.asarray(packed)[: step.num_steps])

    def _function(self, step: ScheduledStep) -> Any:
        if step.is_prefill:
            return self.functions.prefill
        return self.functions.decode if self.options.use_cache else self.functions.rerun

    def _seat(self, sequences: list[Sequence]) -> None:
        """Tells the device about sequences that are new in their slots."""
        if self._plain:
            return
        changed = False
        for sequence in sequences:
            slot = sequence.slot
            assert slot is not None
            if self._seated[slot] is sequence:
                continue
            self._seated[slot] = sequence
            before = self._params[slot].copy()
            packing.write_params(self._params[slot], sequence)
            changed |= not np.array_equal(before, self._params[slot])
            if sequence.params.has_penalties:
                self._seat_counts(np.int32(slot), sequence)
        if changed:
            self._device_params = self._put(self._params.copy())

    def _seat_counts(self, slot: np.int32, sequence: Sequence) -> None:
        vocab = self.model.config.vocab_size
        seen = np.zeros(vocab, np.int32)
        np.add.at(seen, sequence.output_tokens, 2)
        seen[sequence.prompt_tokens] += 1
        _, self.counts = self.functions.seat(None, self.counts, slot, seen)

    def lowered(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Every program that was warmed up, by name; for tools that look into programs."""
        for is_prefill, *shape in sorted(self._warm):
            step = ScheduledStep([], [], is_prefill, num_steps=1)
            host = self._inputs(step, *shape)
            lowered = self._function(step).lower(self.model, (self.cache, self.counts), host)
            yield f"{'prefill' if is_prefill else 'decode'} {shape}", lowered

    def shape_of(self, step: ScheduledStep) -> tuple[int, int, int]:
        """(rows, tokens per row, context) that a step is padded to."""
        seq = max(step.num_tokens)
        context = max(
            s.num_computed_tokens + n * (1 if step.is_prefill else step.num_steps)
            for s, n in zip(step.sequences, step.num_tokens, strict=True)
        )
        if not self.options.use_cache:
            seq = context = max(s.num_tokens for s in step.sequences)
        rows = len(step.sequences)
        if not self.options.jit:
            return rows, seq, context
        if rows > 1 or not step.is_prefill:
            rows = self.num_slots
        if not self.options.use_cache:
            length = self._context_bucket(context)
            return rows, length, length
        if step.is_prefill:
            seq = max(self.prefill_seq, min(bucket(seq, SMALLEST_PREFILL), self.prefill_chunk))
        return rows, seq, self._context_bucket(context)

    def _context_bucket(self, context: int) -> int:
        return min(bucket(context, SMALLEST_CONTEXT), self.max_tokens)

    def _inputs(self, step: ScheduledStep, rows: int, seq: int, context: int) -> StepInput:
        layout = Layout(seq, self._table_lengths(step, seq, context))
        packed = layout.empty(rows, self.num_slots)
        packed[:, packing.NUM_STEPS] = step.num_steps
        for row, (sequence, count) in enumerate(zip(step.sequences, step.num_tokens, strict=True)):
            end = sequence.num_computed_tokens + count
            start = sequence.num_computed_tokens if self.options.use_cache else 0
            layout.write(packed[row], sequence, start, end - start)
        return StepInput(packed, self._device_params, layout, self._plain)  # type: ignore[arg-type]

    def _table_lengths(self, step: ScheduledStep, seq: int, context: int) -> tuple[int, ...]:
        if not self.options.use_cache:
            return ()
        new_tokens = seq if step.is_prefill else self.decode_steps
        return tuple(
            min(
                blocks_needed(window, context, new_tokens, BLOCK_SIZE),
                ceil_div(context, BLOCK_SIZE),
            )
            for window in self.windows
        )

    def warm_up(self, sequences: Iterable[Sequence]) -> None:
        """Compiles the shapes that these sequences will need, by running them on empty rows.

        From then on prefills are padded to one number of tokens, so that any mixture of these
        sequences stays within the shapes compiled here.
        """
        sequences = list(sequences)
        if self._plain and not all(s.params.is_plain for s in sequences):
            self._plain = False
            self._warm.clear()
        if not self.options.jit or not sequences:
            return
        longest_prompt = max(s.num_prompt_tokens for s in sequences)
        self.prefill_seq = min(bucket(longest_prompt, SMALLEST_PREFILL), self.prefill_chunk)
        for shape in sorted(self._shapes_of(sequences) - self._warm):
            is_prefill, rows, seq, context = shape
            self._dispatch(ScheduledStep([], [], is_prefill, num_steps=1), rows, seq, context)
            self._warm.add(shape)
        if any(s.params.has_penalties for s in sequences):
            nothing = np.zeros(self.model.config.vocab_size, np.int32)
            scratch = np.int32(self.num_slots)
            _, self.counts = self.functions.seat(None, self.counts, scratch, nothing)

    def _shapes_of(self, sequences: list[Sequence]) -> set[tuple]:
        """Every (is_prefill, rows, tokens per row, context) that sequences can lead to."""
        longest_prompt = max(s.num_prompt_tokens for s in sequences)
        together = len(sequences) <= self.num_slots and longest_prompt <= self.prefill_chunk
        prefill_rows = {self.num_slots} if together else {1, self.num_slots}
        first = longest_prompt if together else 1
        prefill_contexts = self._context_buckets(first, longest_prompt)
        decode_contexts = self._context_buckets(
            min(s.num_prompt_tokens for s in sequences) + 1, max(s.longest for s in sequences)
        )
        if not self.options.use_cache:
            return {(True, rows, c, c) for rows in prefill_rows for c in prefill_contexts} | {
                (False, self.num_slots, c, c) for c in decode_contexts
            }
        return {
            (True, rows, self.prefill_seq, c) for rows in prefill_rows for c in prefill_contexts
        } | {(False, self.num_slots, 1, c) for c in decode_contexts}

    def _context_buckets(self, shortest: int, longest: int) -> set[int]:
        return {self._context_bucket(n) for n in range(shortest, longest + 1)}
