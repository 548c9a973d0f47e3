"""`Runner`: turns a scheduled step into device calls of bucketed shapes and runs them.

It owns the device's state: the model, the KV cache, each slot's sampling parameters. It chooses
shapes; what runs when is the scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from rooflax.engine import packing
from rooflax.engine.block_manager import BlockCopy
from rooflax.engine.buckets import SMALLEST_STEP, Buckets, Shape, StepKind, bucket
from rooflax.engine.compilation import count_compilations
from rooflax.engine.device_steps import StepInput
from rooflax.engine.lockstep import Lockstep
from rooflax.engine.masks import Masks
from rooflax.engine.offloaded_functions import step_functions
from rooflax.engine.packing import DecodeWriter, StepLayout, StepResult, Writer
from rooflax.engine.scheduler import StepPlan
from rooflax.engine.sequence import Sequence, fault_of
from rooflax.errors import EngineError
from rooflax.models.offloading import AnyModel
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.host_memory import give_back_freed
from rooflax.nn.kv_cache import allocate
from rooflax.nn.layout import (
    STATE,
    blocks_needed,
    ceil_div,
    num_snapshots,
    state_grid,
)
from rooflax.nn.mesh import cache_spec, shards_of
from rooflax.nn.placement import put
from rooflax.nn.shards import Shards
from rooflax.ops import sampling_columns
from rooflax.ops.accelerator import block_size
from rooflax.ops.attention.api import PAGED
from rooflax.ops.kernels import chosen
from rooflax.ops.sampling import TokenCounts, awaits_masks

SMALLEST_CONTEXT = 256
"""Tokens; where attention gathers, contexts are padded to this or a power of two above it."""


class StepCall(NamedTuple):
    """One device call: rows, the tokens each of them runs, and lookahead tokens behind those."""

    sequences: list[Sequence]
    counts: list[int]
    shape: Shape
    lookahead: list[list[int]] | None = None


class Compiled(NamedTuple):
    """A line of the warm-up report: a program, and what it took to have it."""

    name: str
    seconds: float
    cache: str


class Runner:
    """Runs steps of up to `max_num_seqs` rows and contexts of up to `max_model_len`.

    Args:
        lockstep: with other processes of the job, which repeat each device call of this one, or
            whose calls this one repeats (`follow`).
        run: what runs a list of tokens, if not `run_step`; as `StepFunctions` takes it.

    Attributes:
        buckets: the shapes in use.
        is_fully_warm: a shape that was not warmed up is an error.
        lost_state: a step failed and took the cache with it.
    """

    def __init__(
        self,
        model: AnyModel,
        config: EngineConfig,
        lockstep: Lockstep | None = None,
        **run: Any,
    ):
        self.model, self.config, self.lockstep = model, config, lockstep
        self.functions = step_functions(
            model, config.options, config.mesh, config.decode_steps, **run
        )
        self.windows = model.config.cached_windows
        self.longest_prefill = ceil_div(config.prefill_chunk, SMALLEST_STEP) * SMALLEST_STEP
        self.state_rows = 1 + config.num_draft_tokens
        keeps_snapshots, longest = config.prefix_caching, config.max_model_len
        self._grid = state_grid(block_size()) if keeps_snapshots else longest + 1
        self.longest_tables = tuple(
            blocks_needed(window, longest, config.new_tokens, block_size(), self.state_rows)
            for window in self.windows
        )
        self.num_blocks = config.num_blocks or self._enough_blocks()
        self._shards = shards_of(config.mesh) or Shards()
        slots, data = config.max_num_seqs, self._shards.data
        self.num_data_shards = 1 if slots % data else data
        self.pads = chosen(config.options.kernels)["linear"] != "native"
        self.buckets = Buckets((slots,), (), self._contexts(), config.num_draft_tokens, self.pads)
        self.is_fully_warm = False
        self._warm: set[Shape] = set()
        self._layouts: dict[Shape, StepLayout] = {}
        self._decode_writers: dict[Shape, DecodeWriter] = {}
        self._wanted: set[Shape] = set()
        self._greedy = True  # while every sequence is: a program without the full sampler
        self._reset()

    def _enough_blocks(self) -> tuple[int, ...]:
        """Blocks for every slot at full length."""
        row_bytes = self.model.config.groups.row_bytes() if self.config.prefix_caching else 0
        kept = num_snapshots(
            row_bytes, self.config.max_num_seqs, self.config.max_model_len, block_size()
        )
        pairs = zip(self.windows, self.longest_tables, strict=True)
        return tuple(1 + self.config.max_num_seqs * n + kept * (w == STATE) for w, n in pairs)

    def reset(self) -> None:
        """An empty cache, and all slots empty."""
        self._tell("reset")
        self._reset()

    def _tell(self, call: str, *arrays: np.ndarray | None, **facts: Any) -> None:
        """Tells the other processes of a device call."""
        if self.lockstep is not None and self.lockstep.leads:
            self.lockstep.send(call, *arrays, **facts)

    def _reset(self) -> None:
        self.lost_state = False
        self.cache = self.counts = None  # before the new ones are there
        keeps = self.config.options.use_cache and self.windows
        self.cache = self._allocate_cache() if keeps else None
        num_counts = self.model.config.vocab_size if self.config.pooler is None else 1
        shape = (self.config.max_num_seqs + 1, num_counts)
        latest = np.zeros((self.config.max_num_seqs + 1, self.config.decode_steps), np.int32)
        counts = TokenCounts(np.zeros(shape, bool), np.zeros(shape, np.int32), latest)  # type: ignore[arg-type]
        self.counts = self._put(counts)
        self._slot_state: list[tuple[Sequence, int] | None] = [None] * self.config.max_num_seqs
        self._params = sampling_columns.empty(self.config.max_num_seqs + 1)
        self._device_params = self._put(self._params.copy())
        words = ceil_div(self.model.config.vocab_size, 32)
        exchanges = (
            self.config.options.jit
            and self.config.mesh is None
            and awaits_masks(self.config.options.kernels)
        )
        self.masks = Masks((self.config.max_num_seqs + 1, words), exchanges=exchanges)
        self._no_masks = self._put(self.masks.everything)

    def _allocate_cache(self) -> Any:
        config, shards = self.model.config, self._shards

        def split(array: np.ndarray) -> jax.Array:
            return put(array, self.config.mesh, cache_spec(shards))

        return allocate(
            config.groups,
            self.num_blocks,
            block_size=block_size(),
            dtype=self.config.kv_dtype,
            stacked=self.config.options.layers == "scan",
            stages=shards.stage,
            put=None if self.config.mesh is None else split,
        )

    def _put(self, tree: Any) -> Any:
        """Copies an array whole to every device."""
        return jax.tree.map(lambda array: put(array, self.config.mesh, PartitionSpec()), tree)

    @property
    def reads_in_place(self) -> bool:
        """Whether attention reads the blocks that a row sees, and not its whole table."""
        in_place = PAGED.preferred(self.config.options.kernels).reads_blocks
        return in_place and self.config.options.gqa != "repeat" and self.config.options.use_cache

    def _contexts(self) -> tuple[int, ...]:
        sizes = {self.config.max_model_len}
        size = self.config.max_model_len if self.reads_in_place else SMALLEST_CONTEXT
        while size < self.config.max_model_len:
            sizes.add(size)
            size *= 2
        return tuple(sorted(sizes))

    def calls(self, plan: StepPlan) -> list[StepCall]:
        """The device calls of a step: one for the list of its tokens, and one for each prompt whose
        tokens are scored."""
        scored = [chunk for chunk in plan.prefills if chunk[0].wants_scores]
        chunks = [(s, 1) for s in plan.decodes]
        chunks += [chunk for chunk in plan.prefills if not chunk[0].wants_scores]
        calls = [StepCall([s], [n], self._scored_shape(s, n)) for s, n in scored]
        if plan.lookahead:
            calls.insert(0, self._verify_call(plan.decodes, plan.lookahead))
        elif chunks:
            calls.insert(0, self._call(chunks, plan.num_steps))
        return calls

    def _call(self, chunks: list[tuple[Sequence, int]], num_steps: int) -> StepCall:
        """A list of tokens; sequences that sample come first."""
        decodes_alone = self.config.pooler is None and all(
            s.num_uncomputed_tokens == 1 for s, _ in chunks
        )
        if not decodes_alone:
            chunks = sorted(chunks, key=lambda chunk: chunk[1] < chunk[0].num_uncomputed_tokens)
        sequences, counts = [s for s, _ in chunks], [n for _, n in chunks]
        ends = [self._end(s, num_steps if decodes_alone else n) for s, n in chunks]
        return StepCall(sequences, counts, self._shape_of(counts, max(ends), decodes_alone))

    def _shape_of(self, counts: list[int], context: int, decodes_alone: bool) -> Shape:
        rows, total = len(counts), sum(counts)
        if not self.config.options.use_cache:
            if self.config.options.jit:
                rows, context = self.config.max_num_seqs, self.buckets.context(context)
            return Shape(StepKind.DENSE, rows, context, context)
        if self.num_data_shards > 1 and not decodes_alone:  # each list holds the longest one
            longest = max(map(sum, self._by_data_shard(counts)))
            rows, total = self.config.max_num_seqs, self.num_data_shards * longest
        if not self.config.options.jit:
            kind = StepKind.DECODE if decodes_alone else StepKind.STEP
            return Shape(kind, rows, total, context)
        if decodes_alone:
            return self.buckets.decode(rows, context)
        shape = self.buckets.step(total, context)
        if shape is None:
            assert not self.is_fully_warm, f"{total} tokens are more than a step's budget"
            self._add_tokens(bucket(total, SMALLEST_STEP))
            shape = self.buckets.step(total, context)
            assert shape is not None
        return shape

    def _by_data_shard(self, counts: list[int]) -> list[list[int]]:
        """The counts, shared out to the lists of the data shards as `_shard_of_chunks` says."""
        parts: list[list[int]] = [[] for _ in range(self.num_data_shards)]
        for count, part in zip(counts, self._shard_of_chunks(counts), strict=True):
            parts[part].append(count)
        return parts

    def _shard_of_chunks(self, counts: list[int]) -> list[int]:
        """Assigns each chunk to a data shard: the longest first, each to the shortest list."""
        lengths, rows = [0] * self.num_data_shards, [0] * self.num_data_shards
        most = self.config.max_num_seqs // self.num_data_shards
        parts = [0] * len(counts)
        for index in sorted(range(len(counts)), key=lambda i: -counts[i]):
            open_ = [part for part in range(self.num_data_shards) if rows[part] < most]
            parts[index] = min(open_, key=lambda part: lengths[part])
            lengths[parts[index]] += counts[index]
            rows[parts[index]] += 1
        return parts

    def _end(self, sequence: Sequence, count: int) -> int:
        return sequence.num_computed_tokens + count

    def _verify_call(self, sequences: list[Sequence], lookahead: list[list[int]]) -> StepCall:
        longest = max(map(len, lookahead))
        context = max(self._end(s, 1 + len(d)) for s, d in zip(sequences, lookahead, strict=True))
        rows = len(sequences)
        shape = Shape(StepKind.VERIFY, rows, rows * (1 + longest), context)
        if self.config.options.jit:
            shape = self.buckets.verify(rows, context)
        return StepCall(sequences, [1] * rows, shape, lookahead)

    def _scored_shape(self, sequence: Sequence, count: int) -> Shape:
        kind = StepKind.SCORED if self.config.options.use_cache else StepKind.SCORED_DENSE
        if not self.config.options.jit:
            return Shape(kind, 1, count, self._end(sequence, count))
        tokens = (
            self.longest_prefill if self.config.options.use_cache else self.config.max_model_len
        )
        return Shape(kind, 1, tokens, self.config.max_model_len)

    def _add_tokens(self, size: int) -> None:
        self.buckets = replace(self.buckets, tokens=tuple(sorted({*self.buckets.tokens, size})))

    def run(self, call: StepCall, num_steps: int) -> StepResult:
        """Runs a call and waits for it; rows beyond the call's sequences are padding."""
        self._load_slots(call.sequences)
        masks = self.masks.of(call.sequences, call.counts)
        with self.masks.during(call.sequences, 1 if masks is None else num_steps) as exchange:
            result = self._dispatch(call, num_steps, masks, exchange)
        return replace(result, reuses_masks=exchange == 0)

    def _dispatch(
        self,
        call: StepCall,
        num_steps: int = 1,
        masks: np.ndarray | None = None,
        exchange: int = 0,
    ) -> StepResult:
        if self.is_fully_warm and call.shape not in self._warm:
            raise EngineError(f"A {call.shape} was not warmed up, and nothing may compile now.")
        host, rows = self._inputs(call, num_steps, exchange)
        if masks is not None:
            host = replace(host, masks=masks)
        self._tell("step", np.asarray(host.packed), masks, shape=call.shape, greedy=self._greedy)
        packed, scores = self._run_step(call.shape, host)
        tokens = np.asarray(packed)[:, rows]
        if self.config.pooler is None:
            result = StepResult(tokens, None if scores is None else np.asarray(scores))
        else:
            result = StepResult(tokens, vectors=np.asarray(scores)[rows])
        self.lost_state = False
        return result

    def _run_step(self, shape: Shape, host: StepInput) -> tuple[jax.Array, jax.Array | None]:
        self.lost_state = True  # donated to a program that may fail, also while its result is read
        function = self.functions.by_kind[shape.kind]
        outputs, carry = function(self.model, (self.cache, self.counts), host)
        self.cache, self.counts = carry
        return outputs

    def follow(self) -> None:
        """Repeats the device calls of process 0 until it ends.

        Raises:
            EngineError: process 0 failed.
        """
        assert self.lockstep is not None
        for call, facts, arrays in self.lockstep.calls():
            match call:
                case "step":
                    kind, *sizes = facts["shape"]
                    self._greedy = facts["greedy"]
                    shape, (packed, masks) = Shape(StepKind(kind), *sizes), arrays
                    host = self._step_input(packed, self._layout(shape))
                    if masks is not None:
                        host = replace(host, masks=masks)
                    jax.block_until_ready(self._run_step(shape, host))
                case "params":
                    self._device_params = self._put(arrays[0])
                case "counts":
                    self._assign_slot(facts["slot"], arrays[0])
                case "copy":
                    half = len(arrays) // 2
                    self._copy(tuple(arrays[:half]), tuple(arrays[half:]))
                case "reset":
                    self._reset()

    def _data_shards_of(self, shape: Shape) -> int:
        """Parts of the list: the data shards, where they divide it (see `nn.mesh.local_tokens`)."""
        lists = self._shards.data
        return 1 if shape.sequences % lists or shape.tokens % lists else lists

    def _inputs(
        self, call: StepCall, num_steps: int, exchange: int = 0
    ) -> tuple[StepInput, list[int] | slice]:
        """Inputs of a step on the device, and the row of each sequence."""
        layout, rows = self._layout(call.shape), slice(len(call.sequences))
        if call.shape.kind is StepKind.DECODE and self._data_shards_of(call.shape) == 1:
            packed = self._decode_writer(call.shape).write(call.sequences, num_steps, exchange)
        else:
            packed, rows = self._write(call, layout, num_steps)
        return self._step_input(packed, layout), rows

    def _step_input(self, packed: np.ndarray, layout: StepLayout) -> StepInput:
        masks = None if self._greedy else self._no_masks
        return StepInput(packed, self._device_params, masks, layout, self._greedy)  # type: ignore[arg-type]

    def _decode_writer(self, shape: Shape) -> DecodeWriter:
        if shape not in self._decode_writers:
            self._decode_writers[shape] = DecodeWriter(
                self._layout(shape), self.config.max_num_seqs
            )
        return self._decode_writers[shape]

    def _write(
        self, call: StepCall, layout: StepLayout, num_steps: int
    ) -> tuple[np.ndarray, list[int]]:
        """The array of any step."""
        rows, dense, lists = layout.sequences, layout.dense, self._data_shards_of(call.shape)
        writer = Writer(layout, self.config.max_num_seqs, lists=1 if dense else lists)
        writer.header[:] = num_steps, len(call.sequences), 0
        parts = [0] * len(call.sequences)
        if lists > 1 and not dense:
            parts = self._shard_of_chunks(call.counts)
            writer.header[packing.NUM_SAMPLED] = rows
        elif not call.lookahead:
            ends = map(self._end, call.sequences, call.counts)
            samples = [e >= s.num_tokens for s, e in zip(call.sequences, ends, strict=True)]
            writer.header[packing.NUM_SAMPLED] = sum(samples)
            assert samples == sorted(samples, reverse=True)
        row_numbers = []
        for number, (sequence, count) in enumerate(zip(call.sequences, call.counts, strict=True)):
            end = self._end(sequence, count)
            start = sequence.num_computed_tokens if self.config.options.use_cache else 0
            lookahead = call.lookahead[number] if call.lookahead else packing.NO_TOKENS
            row_numbers.append(writer.add(sequence, start, end - start, lookahead, parts[number]))
        return writer.finish(), row_numbers

    def _layout(self, shape: Shape) -> StepLayout:
        if shape not in self._layouts:
            kind, rows, tokens, _ = shape
            longest = {StepKind.DECODE: 1, StepKind.VERIFY: tokens // rows}.get(kind, tokens)
            if not self.windows:
                longest = min(longest, shape.context)
            tables = self._table_lengths(shape, longest)
            made = StepLayout(rows, tokens, tables, longest, kind.is_dense)
            group = self.model.config.groups.state
            if group is not None and not kind.is_dense:
                grid = 1 if kind is StepKind.VERIFY else self._grid
                made = replace(made, state=group, state_grid=grid)
            self._layouts[shape] = made
        return self._layouts[shape]

    def _table_lengths(self, shape: Shape, longest: int) -> tuple[int, ...]:
        """
        Args:
            longest: the most tokens of a sequence.
        """
        if not self.config.options.use_cache:
            return ()
        steps = (
            self.config.decode_steps
            if shape.kind is StepKind.DECODE
            else min(longest, self.longest_prefill)
        )
        snapshots = ceil_div(steps, self._grid) if self._grid <= self.config.max_model_len else 0
        rows = self.state_rows if shape.kind is StepKind.VERIFY else 1 + snapshots
        return tuple(
            min(
                blocks_needed(window, shape.context, self.config.new_tokens, block_size(), rows),
                rows if window == STATE else ceil_div(shape.context, block_size()),
            )
            for window in self.windows
        )

    def _load_slots(self, sequences: list[Sequence]) -> None:
        """Copies to the device what sequences that are new in their slots want of the sampler."""
        changed: set[int] = set()
        try:
            for sequence in sequences:
                self._load_slot(sequence, changed)
        finally:  # also of those before one that failed
            if changed:
                self._tell("params", self._params)
                self._device_params = self._put(self._params.copy())

    def _load_slot(self, sequence: Sequence, changed: set[int]) -> None:
        slot, sampler = sequence.schedule.slot, sequence.sampler
        stay = sequence, sequence.schedule.num_preemptions
        assert slot is not None
        # what the device counted is not what the host chose
        miscounts = sampler.num_candidates is not None and sequence.params.has_penalties
        if self._slot_state[slot] == stay and not miscounts:
            return
        before, self._slot_state[slot] = self._params[slot].copy(), None
        with fault_of(sequence):
            packing.write_params(self._params[slot], sequence)
        self._slot_state[slot] = stay
        sampler.num_uncounted = sampler.num_discarded = 0  # its tokens are counted here
        if not np.array_equal(before, self._params[slot]):
            changed.add(slot)
        if sequence.params.has_penalties:
            self._load_counts(slot, sequence)

    def _load_counts(self, slot: int, sequence: Sequence | None) -> None:
        seen = np.zeros(self.model.config.vocab_size, np.int32)
        if sequence is not None:
            np.add.at(seen, sequence.output_tokens, 2)
            seen[sequence.prompt_tokens] += 1
        self._tell("counts", seen, slot=slot)
        self._assign_slot(slot, seen)

    def _assign_slot(self, slot: int, seen: np.ndarray) -> None:
        _, self.counts = self.functions.assign_slot(None, self.counts, np.int32(slot), seen)

    def clear(self, sequence: Sequence) -> None:
        """Zeroes the blocks that the sequence alone owns: what is not finite must not stay."""
        copies = []
        for group, table in enumerate(sequence.kv.block_tables):
            shared = 0 if self.windows[group] == STATE else sequence.kv.num_published_blocks
            first = max(0, shared - sequence.kv.first_positions[group] // block_size())
            copies += [BlockCopy(group, 0, block) for block in table[first:]]
        for begin in range(0, len(copies), self.config.max_num_seqs):
            self.copy(copies[begin : begin + self.config.max_num_seqs])

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copies blocks, at most one per slot and layer group; block 0 is zero."""
        if self.cache is None:
            return
        sources, destinations = (
            tuple(np.zeros(self.config.max_num_seqs, np.int32) for _ in self.windows)
            for _ in range(2)
        )
        for group in range(len(self.windows)):
            in_group = [copy for copy in copies if copy.group == group]
            sources[group][: len(in_group)] = [copy.source for copy in in_group]
            destinations[group][: len(in_group)] = [copy.destination for copy in in_group]
        self._tell("copy", *sources, *destinations)
        self._copy(sources, destinations)

    def _copy(self, sources: tuple[np.ndarray, ...], destinations: tuple[np.ndarray, ...]) -> None:
        _, self.cache = self.functions.copy(None, self.cache, sources, destinations)

    def lowered(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Every step that was warmed up, by name; for tools that look into programs."""
        for shape in sorted(self._warm):
            host, _ = self._inputs(StepCall([], [], shape), 1)
            function = self.functions.by_kind[shape.kind]
            yield str(shape), function.lower(self.model, (self.cache, self.counts), host)

    def warm_up_all(
        self, buckets: Buckets, report: Callable[[Compiled], None], *, scores: bool = True
    ) -> list[Compiled]:
        """Compiles every shape; from then on another one is an error.

        Args:
            report: is told of each program as it is done.
            scores: prompts may want the log-probabilities of their own tokens.
        """
        self.buckets, self.is_fully_warm, self._greedy = buckets, True, False
        longest = self.longest_prefill, self.config.max_model_len
        scored = [Shape(StepKind.SCORED, 1, *longest)] if scores else []
        programs: dict[str, Callable[[], Any]] = {
            str(shape): lambda shape=shape: self.warm(shape)
            for shape in [*buckets.shapes(), *scored]
            if self.config.pooler is None or shape.kind is StepKind.STEP
        }
        if self.config.pooler is None:
            programs["counts of a slot"] = lambda: self._load_counts(self.config.max_num_seqs, None)
        programs["blocks to copy"] = lambda: self.copy([])
        compiled = []
        for name, compile_now in programs.items():
            started = time.perf_counter()
            with count_compilations() as counts:
                compile_now()
            cache = "miss" if counts.compilations else "hit"
            compiled.append(Compiled(name, time.perf_counter() - started, cache))
            report(compiled[-1])
        return compiled

    def is_warm(self, shape: Shape) -> bool:
        """Whether the shape's program is there."""
        return shape in self._warm or not self.config.options.jit

    def warm(self, shape: Shape) -> None:
        """Compiles a shape by running it on empty rows."""
        self._warm.add(shape)
        self._dispatch(StepCall([], [], shape))
        give_back_freed()

    def warm_up_prefill(self, sequences: Iterable[Sequence], num_cached: Iterable[int]) -> None:
        """Compiles what these sequences need up to their first tokens.

        What comes after them waits for `warm_up_decode`: even a program that the persistent cache
        has is traced, to know its name there, which takes a tenth of a second or more.

        Args:
            num_cached: per sequence, how many of its tokens are in the prefix cache.
        """
        sequences = list(sequences)
        if self._greedy and not all(s.params.is_greedy for s in sequences):
            self._greedy = False
            self._warm.clear()
        self._wanted = set()
        if not self.config.options.jit or not sequences or self.is_fully_warm:
            return
        # a constraint may force a few tokens of a row
        if any(s.sampler.constraint is not None for s in sequences):
            self._add_tokens(bucket(2 * self.config.max_num_seqs, SMALLEST_STEP))
        new = [s.num_tokens - n for s, n in zip(sequences, num_cached, strict=True)]
        self._wanted = self._shapes_of(sequences, new)
        self._warm_wanted(StepKind.STEP, StepKind.DENSE)
        scored = self._scored_shape(sequences[0], 1)
        if any(s.wants_scores for s in sequences) and scored not in self._warm:
            self.warm(scored)
        if any(s.params.has_penalties for s in sequences):
            self._load_counts(self.config.max_num_seqs, None)
        if any(len(s.schedule.siblings) > 1 for s in sequences):
            self.copy([])

    def warm_up_decode(self) -> None:
        """Compiles the rest of what the sequences of `warm_up_prefill` need."""
        self._warm_wanted(StepKind.DECODE, StepKind.VERIFY)

    def _warm_wanted(self, *kinds: StepKind) -> None:
        for shape in sorted(self._wanted - self._warm):
            if shape.kind in kinds:
                self.warm(shape)

    def _shapes_of(self, sequences: list[Sequence], new: list[int]) -> set[Shape]:
        """Shapes of the first step, and of the decode steps that the sequences lead to.

        Others that come are compiled when they do.

        Args:
            new: per sequence, the tokens that no cache has.
        """
        contexts = {self.buckets.context(s.num_tokens) for s in sequences}
        later = range(min(s.num_tokens for s in sequences), max(s.longest for s in sequences) + 1)
        later = later if self.config.pooler is None else range(0)
        ends = contexts | {self.buckets.context(end) for end in later}
        if not self.config.options.use_cache:
            return {Shape(StepKind.DENSE, self.config.max_num_seqs, end, end) for end in ends}
        shapes = set()
        if self.config.pooler is None:
            shapes |= {self.buckets.decode(self.config.max_num_seqs, end) for end in ends}
        if self.buckets.lookahead_tokens:
            shapes |= {self.buckets.verify(self.config.max_num_seqs, end) for end in ends}
        counts = [n for s, n in zip(sequences, new, strict=True) if not s.wants_scores]
        counts = self._first_step(counts[: self.config.max_num_seqs])
        if self.config.pooler is not None or any(count > 1 for count in counts):
            context = max(contexts)
            shapes.add(self._shape_of(counts, context, decodes_alone=False))
        return shapes

    def _first_step(self, new: list[int]) -> list[int]:
        """First step: so many tokens of each sequence as its budget holds."""
        budget, counts = self.config.max_tokens_per_step, []
        for count in new:
            counts.append(min(count, budget, self.longest_prefill))
            budget -= counts[-1]
        return [count for count in counts if count]
