"""`AdapterSlots`: a weight of any format with LoRA adapters beside it, one for each row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.dot import dot_general
from rooflax.ops.linear import cpu
from rooflax.ops.linear.api import matmul
from rooflax.ops.linear.prologue import Prologue, applied
from rooflax.ops.real_rows import NumRows
from rooflax.ops.weights import StackMember, Wrapper, at, taken

STATIC = {"static": True}
LANES = 16
"""Outputs side by side in B."""
Spans = tuple[tuple[int, int, int], ...]
"""Runs of outputs, in order: the first, how many, and the part of A that they have."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdapterSlots(Wrapper):
    """y = x W + (x A[s]) B[s] for a row of slot s, x being what the prologue makes of the rows.

    x A and its product with B are summed in float32; the sum has the dtype of y. A row without an
    adapter is what it is without, bit for bit.

    Attributes:
        base: W, an array [*in, *out] or an operand.
        a: [slots, in, width], float32 or bfloat16: `rank` columns of each part, filled up to whole
            vectors.
        b: as A, [slots, panels, rank, LANES], each adapter's scale included; a span's outputs
            begin a panel.
        spans: the outputs that adapters change; others have no B.
        rows: the slot of each row of x, from 1 on; 0 is no adapter. None is none for all.
    """

    base: Any
    a: Float[Array, "*stack slots inner width"] | StackMember
    b: Float[Array, "*stack slots panels rank lanes"] | StackMember
    in_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    out_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    spans: Spans = field(metadata=STATIC)
    rows: Int[Array, " rows"] | None = None
    is_table: bool = field(default=False, metadata=STATIC)

    def at(self, index: Any) -> AdapterSlots:
        """One of stacked layers, left where it lies."""
        return replace(
            self, **{name: at(getattr(self, name), index) for name in ("base", "a", "b")}
        )

    def matmul(
        self,
        x: Float[Array, "rows width"],
        bias: Float[Array, " out"] | StackMember | None = None,
        *,
        prologue: Prologue | None,
        residual: Float[Array, "rows out"] | None,
        num_rows: Int[Array, ""] | None,
        dtype: Any,
        implementation: str | None,
    ) -> Float[Array, "rows out"]:
        """`linear.api.matmul` of the sum."""
        y = matmul(
            self.operand, x, bias, prologue=prologue, residual=residual, num_rows=num_rows,
            dtype=dtype, implementation=implementation,
        )  # fmt: skip
        if self.rows is None:
            return y
        return BY_ROW(implementation, self, x, y, self.rows, prologue, num_rows)

    def take(self, ids: Int[Array, " n"], **options: Any) -> Float[Array, "n in"]:
        raise AssertionError("an adapter of an embedding is not served")


def with_rows(weights: Any, rows: Int[Array, " rows"]) -> Any:
    """A tree of weights whose adapters know which rows have which."""

    def chosen(leaf: Any) -> Any:
        return replace(leaf, rows=rows) if isinstance(leaf, AdapterSlots) else leaf

    return jax.tree.map(chosen, weights, is_leaf=lambda leaf: isinstance(leaf, AdapterSlots))


def places(spans: Spans, outer: int) -> np.ndarray:
    """Place of each output among those of all panels; behind the last where it has none."""
    ends = np.cumsum([0, *(-(-count // LANES) * LANES for _, count, _ in spans)])
    columns = np.full(outer, ends[-1])
    for (first, count, _), begin in zip(spans, ends, strict=False):
        columns[first : first + count] = begin + np.arange(count)
    return columns


def _by_xla(
    slots: AdapterSlots,
    x: Float[Array, "rows width"],
    y: Float[Array, "rows out"],
    rows: Int[Array, " rows"],
    prologue: Prologue | None,
    num_rows: NumRows,
) -> Float[Array, "rows out"]:
    """All adapters' x A, of which each row keeps its own; zeros add nothing behind B."""
    del num_rows  # padding is computed like the rest
    a, b = taken(slots.a), taken(slots.b)
    count, panels, rank, lanes = b.shape
    wide = applied(prologue, x).astype(jnp.float32)
    few = dot_general(wide, a, (((1,), (1,)), ((), ())))
    hits = jnp.arange(1, count + 1, dtype=jnp.int32)[None] == rows[:, None]
    kept = jnp.where(hits[:, :, None], few, 0.0)
    parts = np.concatenate(
        [np.full(-(-n // lanes) * lanes, part) for _, n, part in slots.spans], dtype=np.int32
    )
    change = jnp.zeros((x.shape[0], panels * lanes), jnp.float32)
    for part in sorted(set(parts.tolist())):
        of_part = kept[:, :, part * rank : (part + 1) * rank]
        product = dot_general(of_part, b, (((1, 2), (0, 2)), ((), ()))).reshape(change.shape)
        change = jnp.where(parts == part, product, change)
    columns = places(slots.spans, y.shape[1])
    change = change.at[:, columns].get(mode="fill", fill_value=0)
    return jnp.where(rows[:, None] > 0, (y.astype(jnp.float32) + change).astype(y.dtype), y)


def _native(
    slots: AdapterSlots,
    x: Float[Array, "rows width"],
    y: Float[Array, "rows out"],
    rows: Int[Array, " rows"],
    prologue: Prologue | None,
    num_rows: NumRows,
) -> Float[Array, "rows out"]:
    return cpu.add_adapters(x, y, slots.a, slots.b, slots.spans, rows, prologue, num_rows)


def _unsupported(_slots: Any, _x: Any, y: Array, *_: Any) -> str | None:
    if y.dtype not in cpu.NATIVE_DTYPES:
        return f"the native kernels add no adapters to {y.dtype}"
    return None


BY_ROW = Operation(
    "adapters",
    {
        "reference": Backend(_by_xla),
        "xla": Backend(_by_xla),
        "native": Backend(_native, _unsupported),
    },
)
