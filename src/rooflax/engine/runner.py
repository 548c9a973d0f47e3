"""`Runner`: turns a scheduled step into arrays of a bucketed shape and runs it.

It owns the device's state: the model, the KV cache, the penalties' counts. It chooses shapes; what
runs when is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rooflax.engine.scheduler import ScheduledStep
from rooflax.engine.sequence import Sequence
from rooflax.engine.steps import StepFunctions, StepInput
from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import allocate
from rooflax.nn.layout import blocks_needed, ceil_div
from rooflax.nn.mesh import CACHE_SPEC
from rooflax.ops.sampling import Sampled, Sampling, TokenCounts
from rooflax.ops.sampling_limits import MAX_LOGIT_BIAS

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
        counts = TokenCounts(np.zeros(shape, bool), np.zeros(shape, np.int32))  # type: ignore[arg-type]
        sharding = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(counts, sharding)

    def run(self, step: ScheduledStep) -> Sampled:
        """Runs a step and waits for it.

        Returns:
            NumPy arrays, [num_steps, rows, ...]; rows beyond the step's sequences are padding.
        """
        return self._dispatch(step, *self.shape_of(step))

    def _dispatch(self, step: ScheduledStep, rows: int, seq: int, context: int) -> Sampled:
        function, host = self._call(step, rows, seq, context)
        sampled, carry = function(self.model, (self.cache, self.counts), *host)
        self.cache, self.counts = carry
        sampled = jax.tree.map(np.asarray, sampled)
        if sampled.tokens.ndim == 1:
            return jax.tree.map(lambda a: a[None], sampled)
        return jax.tree.map(lambda a: a[: step.num_steps], sampled)

    def _call(self, step: ScheduledStep, rows: int, seq: int, context: int) -> tuple[Any, tuple]:
        """The step function, and its arguments after the model and the carry."""
        host = self._inputs(step, rows, seq, context)
        if step.is_prefill:
            return self.functions.prefill, (host,)
        if not self.options.use_cache:
            return self.functions.rerun, (host,)
        return self.functions.decode, (host, np.int32(step.num_steps))

    def lowered(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Every program that was warmed up, by name; for tools that look into programs."""
        for is_prefill, *shape in sorted(self._warm):
            function, host = self._call(ScheduledStep([], [], is_prefill, num_steps=1), *shape)
            lowered = function.lower(self.model, (self.cache, self.counts), *host)
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
        return StepInput(
            batch=self._batch(step, rows, seq, context),
            slots=_rows([s.slot for s in step.sequences], rows, self.num_slots, np.int32),
            sampling=replace(sampling_arrays(step.sequences, rows), plain=self._plain),
            fresh=_rows([s.num_computed_tokens == 0 for s in step.sequences], rows, False, bool),
            samples=_rows(
                [
                    s.num_computed_tokens + n >= s.num_prompt_tokens
                    for s, n in zip(step.sequences, step.num_tokens, strict=True)
                ],
                rows,
                False,
                bool,
            ),
        )

    def _batch(self, step: ScheduledStep, rows: int, seq: int, context: int) -> Batch:
        tokens = np.zeros((rows, seq), np.int32)
        start = np.zeros(rows, np.int32)
        query_lens = np.zeros(rows, np.int32)
        for row, (sequence, count) in enumerate(zip(step.sequences, step.num_tokens, strict=True)):
            start[row] = sequence.num_computed_tokens if self.options.use_cache else 0
            query_lens[row] = count if self.options.use_cache else sequence.num_tokens
            end = start[row] + query_lens[row]
            tokens[row, : query_lens[row]] = sequence.tokens[start[row] : end]
        positions = start[:, None] + np.arange(seq, dtype=np.int32)[None]
        batch = Batch(tokens, positions, query_lens, start + query_lens)  # type: ignore[arg-type]
        if not self.options.use_cache:
            return batch
        tables, firsts = self._tables(step, rows, seq, context)
        return replace(batch, block_tables=tables, first_positions=firsts)

    def _tables(
        self, step: ScheduledStep, rows: int, seq: int, context: int
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        tables, firsts = [], []
        new_tokens = seq if step.is_prefill else self.decode_steps
        for group, window in enumerate(self.windows):
            length = min(
                blocks_needed(window, context, new_tokens, BLOCK_SIZE),
                ceil_div(context, BLOCK_SIZE),
            )
            table = np.zeros((rows, length), np.int32)
            for row, sequence in enumerate(step.sequences):
                blocks = sequence.block_tables[group]
                table[row, : len(blocks)] = blocks
            tables.append(table)
            first = [s.first_positions[group] for s in step.sequences]
            firsts.append(_rows(first, rows, 0, np.int32))
        return tuple(tables), tuple(firsts)

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


def sampling_arrays(sequences: list[Sequence], rows: int) -> Sampling:
    """The rows' sampling parameters as arrays; padding rows are greedy."""
    params = [s.params for s in sequences]
    bias_ids = np.zeros((rows, MAX_LOGIT_BIAS), np.int32)
    bias_values = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
    for row, p in enumerate(params):
        count = len(p.logit_bias)
        bias_ids[row, :count] = list(p.logit_bias.keys())
        bias_values[row, :count] = list(p.logit_bias.values())

    def column(name: str, default: float, dtype: Any) -> Any:
        return _rows([getattr(p, name) for p in params], rows, default, dtype)

    logprobs = [-1 if p.logprobs is None else p.logprobs for p in params]
    return Sampling(
        temperature=column("temperature", 0.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 0, np.uint32),
        sample_index=_rows([s.sample_index for s in sequences], rows, 0, np.uint32),
        repetition_penalty=column("repetition_penalty", 1.0, np.float32),
        presence_penalty=column("presence_penalty", 0.0, np.float32),
        frequency_penalty=column("frequency_penalty", 0.0, np.float32),
        bias_ids=bias_ids,  # type: ignore[arg-type]
        bias_values=bias_values,  # type: ignore[arg-type]
        num_logprobs=_rows(logprobs, rows, -1, np.int32),
    )


def _rows(values: list, rows: int, padding: Any, dtype: Any) -> Any:
    """Values as an array of `rows`, padded at the end."""
    return np.array([*values, *[padding] * (rows - len(values))], dtype)
