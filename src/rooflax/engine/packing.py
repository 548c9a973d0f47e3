"""One array to the device per step and one back: their columns, and how to write and read them.

Every argument of a dispatch costs about as much as a small kernel, so a step travels as one int32
array: a few numbers of the step, columns of each sequence, and the list of all their tokens.
Sampling parameters stay on the device, one row per slot, and are sent again only when a slot is
reassigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rooflax.engine.sequence import Sequence, TokenLogprobs
from rooflax.fields.sampling import MAX_LOGPROBS, MAX_STOP_IDS
from rooflax.nn.batch import Batch
from rooflax.ops import sampling_columns as columns
from rooflax.ops.sampling import Sampled

NUM_STEPS, NUM_SAMPLED, EXCHANGE, HEADER = range(4)
"""Numbers of the whole step: decode steps, how many of the first sequences sample, and the mask
exchange of a dispatch whose masks are made as its tokens come, or 0."""
SLOT, POSITION, QUERY_START, QUERY_LEN, SAMPLES, NEXT, UNCOUNTED, DISCARDED = range(8)
ADAPTER, FIRST = 8, 9
"""Columns of a sequence; from FIRST on: first positions, block tables. NEXT is the token after its
tokens, where it has one; UNCOUNTED is how many of its last tokens the device has yet to count, and
DISCARDED how many of those that it counted last do not stand. ADAPTER is the slot of its adapter, 0
for none."""
TOKEN, STATE = range(2)
"""Columns of what comes back, before the log-probabilities."""
RAN, FINITE, ALLOWED = 1, 2, 4
"""Bits of STATE."""
NO_TOKENS: list[int] = []


@dataclass(frozen=True)
class StepLayout:
    """Sizes of a step's array; static, so that each is a program of its own.

    Attributes:
        sequences: rows of columns.
        tokens: of the list; of each sequence, where the step is dense.
        tables: per layer group, blocks in a sequence's table; empty without a cache.
        longest: the most tokens of a sequence.
        dense: a rectangle of whole sequences, for runs without a cache.
        state: the group of layers with state, if there is one.
        state_grid: see `Batch`; 1 for steps with drafts.
    """

    sequences: int
    tokens: int
    tables: tuple[int, ...] = ()
    longest: int = 1
    dense: bool = False
    state: int | None = None
    state_grid: int = 1

    @property
    def width(self) -> int:
        return FIRST + len(self.tables) + sum(self.tables)

    @property
    def num_tokens(self) -> int:
        return self.tokens * self.sequences if self.dense else self.tokens

    def split(self, packed: Any) -> tuple[Any, Any, Any]:
        """The header, the sequences' rows, and the tokens; of a NumPy array these are views."""
        end = HEADER + self.sequences * self.width
        rows = packed[HEADER:end].reshape(self.sequences, self.width)
        tokens = packed[end:]
        return packed[:HEADER], rows, tokens.reshape(-1, self.tokens) if self.dense else tokens

    def batch(self, packed: Int[Array, " size"], hidden: jax.Array | None = None) -> Batch:
        """The tokens as the model's batch; inside the jitted step."""
        _, rows, tokens = self.split(packed)
        if self.dense:
            return Batch.dense(tokens, lengths=rows[:, QUERY_LEN], hidden=hidden)
        firsts = tuple(rows[:, FIRST + group] for group in range(len(self.tables)))
        at, tables = FIRST + len(self.tables), []
        for length in self.tables:
            tables.append(rows[:, at : at + length])
            at += length
        start, count, position = (rows[:, at] for at in (QUERY_START, QUERY_LEN, POSITION))
        options = {"longest": self.longest, "state_grid": self.state_grid, "hidden": hidden}
        return Batch.ragged(tokens, start, count, position, tuple(tables), firsts, **options)


class Writer:
    """Fills a step's array on the host.

    Args:
        lists: parts of the list of tokens, each with as many sequences: one per data shard.
    """

    def __init__(self, layout: StepLayout, scratch_slot: int, *, lists: int = 1):
        self.layout = layout
        size = HEADER + layout.sequences * layout.width + layout.num_tokens
        self.packed = np.zeros(size, np.int32)
        self.header, self.rows, self._tokens = layout.split(self.packed)
        self.rows[:, SLOT] = scratch_slot
        self._written: dict[int, list[int]] = {}
        self._ends = [part * (layout.tokens // lists) for part in range(lists)]
        self._counts = [0] * lists

    def add(
        self,
        sequence: Sequence,
        start: int,
        count: int,
        lookahead: list[int] = NO_TOKENS,
        part: int = 0,
    ) -> int:
        """Adds `count` tokens of a sequence from position `start` on, and lookahead tokens.

        Args:
            part: of the list.

        Returns:
            Its row.
        """
        layout = self.layout
        index = part * (layout.sequences // len(self._counts)) + self._counts[part]
        self._counts[part] += 1
        total = count + len(lookahead)
        samples = start + count >= sequence.num_tokens
        following = 0 if samples else sequence.tokens[start + count]
        slot, sampler = sequence.schedule.slot, sequence.sampler
        uncounted = max(0, start + count + sampler.num_uncounted - sequence.num_tokens)
        columns = [slot, start, self._ends[part], total, samples, following, uncounted]
        columns += [sampler.num_discarded, sequence.kv.adapter]
        columns += _tables(sequence, layout)
        self._written[index] = columns
        tokens = self._tokens[index] if layout.dense else self._tokens
        at = 0 if layout.dense else self._ends[part]
        if total == 1:
            tokens[at] = sequence.tokens[start]
        else:
            tokens[at : at + total] = sequence.tokens[start : start + count] + lookahead
        if not layout.dense:
            self._ends[part] += total
        return index

    def finish(self) -> np.ndarray:
        """The array, with what `add` collected of every row: one copy is cheaper than one each."""
        if self._written:
            self.rows[list(self._written)] = list(self._written.values())
        return self.packed


class DecodeWriter:
    """Fills the array of decode steps, which it keeps: most of a row stays from step to step.

    Of sequences that run their last token each, in one list, it writes what a new `Writer` would.
    """

    def __init__(self, layout: StepLayout, scratch_slot: int):
        self.layout = layout
        self._empty = Writer(layout, scratch_slot)
        self._packed = self._empty.packed.copy()
        self._header, self._rows, self._tokens = layout.split(self._packed)
        self._known: list[tuple[Sequence, int]] = []

    def write(self, sequences: list[Sequence], num_steps: int, exchange: int = 0) -> np.ndarray:
        """The array; a copy, because a device may read it while the next one is written."""
        rows, count = self._rows, len(sequences)
        self._header[:] = num_steps, count, exchange
        known = [(sequence, sequence.kv.version) for sequence in sequences]
        if known != self._known:
            self._write_tables(known)
        rows[:count, POSITION] = [s.num_computed_tokens for s in sequences]
        rows[:count, UNCOUNTED] = [s.sampler.num_uncounted for s in sequences]
        rows[:count, DISCARDED] = [s.sampler.num_discarded for s in sequences]
        self._tokens[:count] = [s.tokens[-1] for s in sequences]
        return self._packed.copy()

    def _write_tables(self, known: list[tuple[Sequence, int]]) -> None:
        """The columns that stay as long as nothing is new in a row."""
        count, before = len(known), len(self._known)
        for index, (sequence, _) in enumerate(known):
            if index >= before or self._known[index] != known[index]:
                columns = [sequence.schedule.slot, 0, index, 1, True, 0, 0, 0]
                columns.append(sequence.kv.adapter)
                self._rows[index] = columns + _tables(sequence, self.layout)
        self._rows[count:before] = self._empty.rows[count:before]
        self._tokens[count:before] = 0
        self._known = known


def _tables(sequence: Sequence, layout: StepLayout) -> list[int]:
    """The columns from FIRST on."""
    if not layout.tables:
        return []
    columns = list(sequence.kv.first_positions)
    for group, length in enumerate(layout.tables):
        blocks = sequence.kv.block_tables[group]
        if group == layout.state and layout.state_grid > 1:
            blocks = [blocks[0], *(row for _, row in sequence.kv.snapshots)]
        # a sequence may hold blocks for more steps than this one
        columns += blocks[:length]
        columns += [0] * (length - len(blocks))
    return columns


def write_params(row: np.ndarray, sequence: Sequence) -> None:
    """Writes a sequence's sampling parameters into the columns of one slot."""
    params, sampler = sequence.params, sequence.sampler
    values: dict[str, Any] = {name: getattr(params, name, None) for name in columns.SCALARS}
    values["sample_index"] = sequence.sample_index
    values["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    values["scores_adjusted"] = sampler.num_candidates is not None
    if sampler.num_candidates is not None:
        values["num_logprobs"] = sampler.num_candidates
    values["min_position"] = sequence.num_prompt_tokens + params.min_tokens
    values["is_masked"] = sampler.constraint is not None
    bias = {**params.logit_bias, **dict.fromkeys(params.banned_token_ids, -np.inf)}
    known = sorted(sequence.stop_ids)[:MAX_STOP_IDS]
    columns.write(row, values, bias, params.allowed_token_ids, known)


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def pack_sampled(
    sampled: Sampled, is_finite: Bool[Array, " B"], *, greedy: bool
) -> Int[Array, "B width"]:
    """Packs the sampled tokens into one array."""
    state = RAN + FINITE * is_finite.astype(jnp.int32)
    state += ALLOWED * sampled.is_allowed.astype(jnp.int32)
    parts = [sampled.tokens[:, None], state[:, None]]
    if not greedy:
        parts.append(pack_logprobs(sampled.logprobs, sampled.top_tokens, sampled.top_logprobs))
    return jnp.concatenate(parts, axis=1)


def pack_pooled(is_finite: Bool[Array, " B"]) -> Int[Array, "B width"]:
    """As `pack_sampled`, of rows that chose nothing."""
    state = RAN + ALLOWED + FINITE * is_finite.astype(jnp.int32)
    return jnp.stack([jnp.zeros_like(state), state], axis=1)


def sampled_width(vocab_size: int, *, greedy: bool) -> int:
    """Columns of `pack_sampled`."""
    return 2 if greedy else 3 + 2 * min(MAX_LOGPROBS, vocab_size)


def pack_logprobs(
    chosen: Float[Array, " B"], ids: Int[Array, "B top"], values: Float[Array, "B top"]
) -> Int[Array, "B width"]:
    """The token's log-probability, the best ids, and theirs."""
    bits = _bits(chosen, jnp.int32)[:, None], ids, _bits(values, jnp.int32)
    return jnp.concatenate(bits, axis=1)


def unpack_logprobs(packed: np.ndarray, count: int) -> TokenLogprobs:
    """Unpacks a token's log-probabilities, with the `count` best, that `pack_logprobs` wrote."""
    floats, top = packed.view(np.float32), packed.shape[0] // 2
    best = zip(packed[1 : 1 + count], floats[1 + top : 1 + top + count], strict=True)
    return TokenLogprobs(float(floats[0]), tuple((int(i), float(v)) for i, v in best))


@dataclass(frozen=True)
class StepResult:
    """Result of a step, NumPy int32.

    Attributes:
        packed: [steps, rows, width], as `pack_sampled` wrote it; a state of zero where the loop
            ended early, or a lookahead token was rejected.
        scores: [tokens, width], as `pack_logprobs` wrote it, of a scored prompt.
        reuses_masks: every step ran with the masks of the first.
        vectors: [rows, width] float32, of a step that pools.
    """

    packed: np.ndarray
    scores: np.ndarray | None = None
    reuses_masks: bool = True
    vectors: np.ndarray | None = None

    @cached_property
    def _rows(self) -> list[list[list[int]]]:
        """Token and state of each step and row, as lists that Python reads faster."""
        return self.packed[:, :, : STATE + 1].tolist()

    @property
    def num_steps(self) -> int:
        """Decode steps that ran."""
        return self.num_tokens(0)

    def num_tokens(self, row: int) -> int:
        """Tokens that a row got."""
        steps = self._rows
        return len(steps) if steps[-1][row][STATE] else sum(rows[row][STATE] > 0 for rows in steps)

    def token(self, step: int, row: int) -> int:
        return self._rows[step][row][TOKEN]

    def is_finite(self, step: int, row: int) -> bool:
        return self._rows[step][row][STATE] & FINITE > 0

    def is_allowed(self, step: int, row: int) -> bool:
        """Whether there was a token that the row may have."""
        return self._rows[step][row][STATE] & ALLOWED > 0

    def logprobs(self, step: int, row: int, count: int) -> TokenLogprobs:
        return unpack_logprobs(self.packed[step, row, STATE + 1 :], count)
