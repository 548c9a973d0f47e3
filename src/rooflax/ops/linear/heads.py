"""A linear layer of each head: every head's rows by a matrix of its own."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.linear import cpu
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import Operand, as_operand


@parts.matmuls
def linear_by_head(
    x: Float[Array, "*batch heads width"],
    w: Float[Array, "heads width out"] | Operand,
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch heads out"]:
    """y[..., h, :] = x[..., h, :] @ w[h], accumulated in float32, in x's dtype.

    Args:
        w: a stack over the heads; a quantized one rounds x as it says.
        num_rows: how many leading rows of x, its batch axes taken as one, are real; None is all.
        implementation: as for `linear`; on GPU and TPU it is XLA's.
    """
    stack, index = as_operand(w, stack=1).in_stack()
    rows = x.reshape(-1, *x.shape[-2:])
    args = LinearArgs(rows, stack, index, num_rows=num_rows)  # type: ignore[arg-type]
    return BY_HEAD(implementation, args).astype(x.dtype).reshape(*x.shape[:-1], -1)


def _xla(args: LinearArgs) -> Float[Array, "rows heads out"]:
    return args.matrix.dot_each(args.x)


def _native(args: LinearArgs) -> Float[Array, "rows heads out"]:
    """The kernel of experts: a head's rows run together, and each is summed in order of k."""
    num_rows, heads, width = args.x.shape
    flat = LinearArgs(
        args.x.reshape(-1, width), args.w, args.index,
        num_rows=None if args.num_rows is None else args.num_rows * heads,
    )  # fmt: skip
    select = jnp.tile(jnp.arange(heads, dtype=jnp.int32), num_rows)
    return cpu.selected_matmul(flat, select).reshape(num_rows, heads, -1)


BY_HEAD = Operation(
    "linear",
    {
        "reference": Backend(_xla),
        "xla": Backend(_xla),
        "native": Backend(_native, cpu.unsupported),
    },
)
