"""One array to the device per step and one back: their columns, and how to write and read them.

Every argument of a dispatch costs about as much as a small kernel, so a step's rows travel as
columns of one int32 array, floats by their bits. What a request wants of the sampler stays on the
device, one row per slot, and is sent again only when a slot changes hands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rooflax.engine.sequence import Sequence, TokenLogprobs
from rooflax.nn.batch import Batch
from rooflax.ops import sampling_columns as columns
from rooflax.ops.sampling import Sampled
from rooflax.ops.sampling_limits import MAX_LOGPROBS, MAX_STOP_IDS

SLOT, START, QUERY_LEN, SAMPLES, NUM_STEPS, NEXT, FIRST = range(7)
"""Columns of a row; from FIRST on: first positions, block tables, tokens. NEXT is the token after
them, where the sequence has one."""
TOKEN, STATE = range(2)
"""Columns of what comes back, before the log-probabilities."""
RAN, FINITE, ALLOWED = 1, 2, 4
"""Bits of STATE."""


@dataclass(frozen=True)
class Layout:
    """Widths of what a row holds; static, so that each is a program of its own.

    Attributes:
        seq: tokens per row.
        tables: per layer group, blocks in a row's table; empty without a cache.
    """

    seq: int
    tables: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return FIRST + len(self.tables) + sum(self.tables) + self.seq

    def empty(self, rows: int, scratch_slot: int) -> np.ndarray:
        """Rows of padding."""
        packed = np.zeros((rows, self.width), np.int32)
        packed[:, SLOT] = scratch_slot
        return packed

    def write(self, row: np.ndarray, sequence: Sequence, start: int, count: int) -> None:
        """Fills a row with `count` tokens of a sequence from position `start` on."""
        row[SLOT], row[START], row[QUERY_LEN] = sequence.slot, start, count
        row[SAMPLES] = start + count >= sequence.num_tokens
        at = FIRST + len(self.tables)
        if self.tables:
            row[FIRST:at] = sequence.first_positions
            for length, blocks in zip(self.tables, sequence.block_tables, strict=True):
                held = blocks[:length]  # a sequence may hold blocks for more steps than this one
                row[at : at + len(held)] = held
                at += length
        row[at : at + count] = sequence.tokens[start : start + count]
        row[NEXT] = 0 if row[SAMPLES] else sequence.tokens[start + count]

    def add_drafts(self, row: np.ndarray, drafts: list[int]) -> None:
        """Puts tokens behind those of a row."""
        at = self.width - self.seq + row[QUERY_LEN]
        row[at : at + len(drafts)] = drafts
        row[QUERY_LEN] += len(drafts)

    def batch(self, packed: Int[Array, "B width"]) -> Batch:
        """The rows as the model wants them; inside the jitted step."""
        start, query_lens = packed[:, START], packed[:, QUERY_LEN]
        firsts = tuple(packed[:, FIRST + group] for group in range(len(self.tables)))
        at, tables = FIRST + len(self.tables), []
        for length in self.tables:
            tables.append(packed[:, at : at + length])
            at += length
        positions = start[:, None] + jnp.arange(self.seq, dtype=jnp.int32)[None]
        context_lens = start + query_lens
        return Batch(packed[:, at:], positions, query_lens, context_lens, tuple(tables), firsts)


def write_params(row: np.ndarray, sequence: Sequence) -> None:
    """What a sequence wants of the sampler, in the columns of one slot."""
    params = sequence.params
    given: dict[str, Any] = {name: getattr(params, name, None) for name in columns.SCALARS}
    given["sample_index"] = sequence.sample_index
    given["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    if sequence.group is not None:
        given["num_logprobs"] = sequence.group.num_candidates
    given["min_position"] = sequence.num_prompt_tokens + params.min_tokens
    given["is_guided"] = sequence.guide is not None
    bias = {**params.logit_bias, **dict.fromkeys(params.banned_token_ids, -np.inf)}
    known = sorted(sequence.stop_ids)[:MAX_STOP_IDS]
    columns.write(row, given, bias, params.allowed_token_ids, known)


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def pack_sampled(
    sampled: Sampled,
    is_finite: Bool[Array, " B"],
    *,
    plain: bool,
    ran: Bool[Array, " B"] | None = None,
) -> Int[Array, "B width"]:
    """What was chosen, as one array.

    Args:
        ran: rows whose choice counts; None is all.
    """
    state = RAN + FINITE * is_finite.astype(jnp.int32)
    state += ALLOWED * sampled.is_allowed.astype(jnp.int32)
    state = state if ran is None else jnp.where(ran, state, 0)
    parts = [sampled.tokens[:, None], state[:, None]]
    if not plain:
        parts.append(pack_logprobs(sampled.logprobs, sampled.top_tokens, sampled.top_logprobs))
    return jnp.concatenate(parts, axis=1)


def sampled_width(vocab_size: int, *, plain: bool) -> int:
    """Columns of `pack_sampled`."""
    return 2 if plain else 3 + 2 * min(MAX_LOGPROBS, vocab_size)


def pack_logprobs(
    chosen: Float[Array, " B"], ids: Int[Array, "B top"], values: Float[Array, "B top"]
) -> Int[Array, "B width"]:
    """The token's log-probability, the best ids, and theirs."""
    bits = _bits(chosen, jnp.int32)[:, None], ids, _bits(values, jnp.int32)
    return jnp.concatenate(bits, axis=1)


def unpack_logprobs(packed: np.ndarray, count: int) -> TokenLogprobs:
    """What `pack_logprobs` wrote of one token, with the `count` best."""
    floats, top = packed.view(np.float32), packed.shape[0] // 2
    best = zip(packed[1 : 1 + count], floats[1 + top : 1 + top + count], strict=True)
    return TokenLogprobs(float(floats[0]), tuple((int(i), float(v)) for i, v in best))


@dataclass(frozen=True)
class StepResult:
    """What came back, NumPy int32.

    Attributes:
        packed: [steps, rows, width], as `pack_sampled` wrote it; a state of zero where the loop
            ended early, or a draft did not hold.
        scores: [tokens, width], as `pack_logprobs` wrote it, of a scored prompt.
    """

    packed: np.ndarray
    scores: np.ndarray | None = None

    @property
    def num_steps(self) -> int:
        """Decode steps that ran."""
        return self.num_tokens(0)

    def num_tokens(self, row: int) -> int:
        """Tokens that a row got."""
        return int(np.count_nonzero(self.packed[:, row, STATE]))

    def token(self, step: int, row: int) -> int:
        return int(self.packed[step, row, TOKEN])

    def is_finite(self, step: int, row: int) -> bool:
        return bool(self.packed[step, row, STATE] & FINITE)

    def is_allowed(self, step: int, row: int) -> bool:
        """Whether there was a token that the row may have."""
        return bool(self.packed[step, row, STATE] & ALLOWED)

    def logprobs(self, step: int, row: int, count: int) -> TokenLogprobs:
        return unpack_logprobs(self.packed[step, row, STATE + 1 :], count)
