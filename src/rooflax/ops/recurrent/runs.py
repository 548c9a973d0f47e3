"""`Runs`: the sequence of each token in a list, its initial state, and the place of its new one."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NO_ROW = 1 << 30
"""Beyond every pool of states: nothing is written there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Runs:
    """The tokens of several sequences, one sequence after the other.

    Attributes:
        starts: of each sequence, where its tokens begin in the list.
        lens: how many they are; 0 is none.
        positions: of its first token there.
        rows: of the pool, its state before them.
        is_new: it starts at position 0, from zeros, whatever its row holds.
        targets: of the pool, where states of the sequence go; NO_ROW is nowhere. The first is that
            after all its tokens.
        reached: of each target, after how many of its tokens.
        owners, offsets: of each token its sequence, and its number there; see
            `ops.attention.sequences.owners`.
        longest: the most tokens of a sequence.
        grid: all targets but the first are reached at positions that are multiples of it.
    """

    starts: Int[Array, " R"]
    lens: Int[Array, " R"]
    positions: Int[Array, " R"]
    rows: Int[Array, " R"]
    is_new: Bool[Array, " R"]
    targets: Int[Array, "R targets"]
    reached: Int[Array, "R targets"]
    owners: Int[Array, " T"]
    offsets: Int[Array, " T"]
    longest: int = field(metadata={"static": True})
    grid: int = field(metadata={"static": True})

    def numbers(self) -> tuple[Array, ...]:
        """Arrays that the native kernels read."""
        columns = (self.starts, self.lens, self.rows, self.is_new, self.targets, self.reached)
        return tuple(x.astype(jnp.int32) for x in columns)

    def states(self, pool: Float[Array, "rows ..."]) -> Float[Array, "R ..."]:
        """States of each sequence before its tokens."""
        rows = pool.at[self.rows].get(mode="clip")
        is_new = self.is_new.reshape(-1, *[1] * (pool.ndim - 1))
        return jnp.where(is_new, jnp.zeros_like(rows), rows)
