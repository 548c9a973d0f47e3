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
from jaxtyping import Array, Int

from rooflax.engine.sequence import Sequence
from rooflax.nn.batch import Batch
from rooflax.ops.sampling import Sampled, Sampling
from rooflax.ops.sampling_limits import MAX_LOGIT_BIAS, MAX_LOGPROBS

SLOT, START, QUERY_LEN, SAMPLES, NUM_STEPS, FIRST = range(6)
"""Columns of a row; from FIRST on: first positions, block tables, tokens."""

_FLOATS = (
    "temperature", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_UNSIGNED = ("seed", "sample_index")
_INTS = ("top_k", "num_logprobs")
_SCALARS = (*_FLOATS, *_UNSIGNED, *_INTS)
PARAMS_WIDTH = len(_SCALARS) + 2 * MAX_LOGIT_BIAS


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
                row[at : at + len(blocks)] = blocks
                at += length
        row[at : at + count] = sequence.tokens[start : start + count]

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
    given: dict[str, Any] = {name: getattr(params, name, None) for name in _SCALARS}
    given["sample_index"] = sequence.sample_index
    given["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
    floats, unsigned, ints, ids, values = _split(row)
    floats.view(np.float32)[:] = [given[name] for name in _FLOATS]
    unsigned.view(np.uint32)[:] = [given[name] for name in _UNSIGNED]
    ints[:] = [given[name] for name in _INTS]
    ids[:], values[:] = 0, 0
    ids[: len(params.logit_bias)] = list(params.logit_bias.keys())
    values.view(np.float32)[: len(params.logit_bias)] = list(params.logit_bias.values())


def empty_params(slots: int) -> np.ndarray:
    """Nobody's wishes: greedy, and every filter off."""
    packed = np.zeros((slots, PARAMS_WIDTH), np.int32)
    for name, value in {"top_p": 1.0, "repetition_penalty": 1.0}.items():
        packed[:, _FLOATS.index(name)] = np.float32(value).view(np.int32)
    packed[:, _SCALARS.index("num_logprobs")] = -1
    return packed


def sampling_of(rows: Int[Array, "B width"], *, plain: bool) -> Sampling:
    """The columns that `write_params` wrote; inside the jitted step."""
    floats, unsigned, ints, ids, values = _split(rows)
    columns = {name: _bits(floats[:, i], jnp.float32) for i, name in enumerate(_FLOATS)}
    columns |= {name: _bits(unsigned[:, i], jnp.uint32) for i, name in enumerate(_UNSIGNED)}
    columns |= {name: ints[:, i] for i, name in enumerate(_INTS)}
    return Sampling(**columns, bias_ids=ids, bias_values=_bits(values, jnp.float32), plain=plain)


def _split(columns):  # type: ignore[no-untyped-def]  # NumPy's or JAX's
    widths = (len(_FLOATS), len(_UNSIGNED), len(_INTS), MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    ends = np.cumsum(widths)
    return [columns[..., end - n : end] for end, n in zip(ends, widths, strict=True)]


def _bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def pack_sampled(sampled: Sampled, *, plain: bool) -> Int[Array, "B width"]:
    """What was chosen, as one array: the token, its log-probability, the best ids and theirs."""
    columns = [sampled.tokens[:, None]]
    if not plain:
        columns += [
            _bits(sampled.logprobs, jnp.int32)[:, None],
            sampled.top_tokens,
            _bits(sampled.top_logprobs, jnp.int32),
        ]
    return jnp.concatenate(columns, axis=1)


@dataclass(frozen=True)
class StepResult:
    """What came back, [steps, rows, width] int32, columns as `pack_sampled` wrote them."""

    packed: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        return self.packed[:, :, 0]

    def logprobs(self, step: int, row: int, count: int) -> tuple[float, list[tuple[int, float]]]:
        """Of the chosen token, and of the `count` best with their ids."""
        chosen = self.packed[step, row]
        floats = chosen.view(np.float32)
        top = (chosen.shape[0] - 2) // 2
        assert count <= top <= MAX_LOGPROBS
        best = zip(chosen[2 : 2 + count], floats[2 + top : 2 + top + count], strict=True)
        return float(floats[1]), [(int(i), float(v)) for i, v in best]
