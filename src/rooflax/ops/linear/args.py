"""Arguments of a backend of linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.prologue import Prologue, applied
from rooflax.ops.real_rows import NumRows
from rooflax.ops.weights import StackMember, StoredOperand, taken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearArgs:
    """y = prologue(x) @ w + bias + residual, of rows.

    Attributes:
        x: [rows, in]; where the prologue gates, [rows, 2 in].
        w: one matrix, or a stack of them, with the member `index`.
        bias: [out].
        residual: [rows, out].
        num_rows: how many leading rows are real; None is all.
        dtype: of y.
    """

    x: Float[Array, "rows width"]
    w: StoredOperand
    index: Int[Array, ""] | None = None
    bias: Float[Array, " out"] | StackMember | None = None
    prologue: Prologue | None = None
    residual: Float[Array, "rows out"] | None = None
    num_rows: NumRows = None
    dtype: Any = field(default=jnp.float32, metadata={"static": True})

    @property
    def matrix(self) -> StoredOperand:
        """Copies the member out of its stack."""
        return self.w if self.index is None else self.w.member(self.index)

    def unfused(
        self, multiply: Callable[[Float[Array, "rows in"]], Float[Array, "rows out"]]
    ) -> Float[Array, "rows out"]:
        """A plain float32 matmul with all else as operations of their own; padding is computed
        like the rest."""
        y = multiply(applied(self.prologue, self.x))
        bias: jax.Array | None = taken(self.bias)
        if bias is not None:
            y = y + bias.astype(jnp.float32)[None, :]
        y = y.astype(self.dtype)
        return y if self.residual is None else y + self.residual
