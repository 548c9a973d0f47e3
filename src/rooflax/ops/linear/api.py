"""The linear operation: checks and dispatch."""

from __future__ import annotations

import math
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.linear import cpu
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import Norm, Prologue, taken_prologue
from rooflax.ops.weights import (
    Branch,
    Composite,
    Fused,
    Operand,
    StackMember,
    StoredOperand,
    as_operand,
    as_table,
    taken,
)

LINEAR = Operation(
    "linear",
    {
        "trained": "rooflax.ops.linear.trained",  # asked for by name alone
        "reference": "rooflax.ops.linear.reference",
        "xla": "rooflax.ops.linear.xla",
        "native": "rooflax.ops.linear.cpu",
        "pallas": "rooflax.ops.linear.{platform}",
    },
)


@parts.matmuls
def linear(
    x: Float[Array, "*batch"],
    w: Float[Array, "*weight"] | Operand,
    bias: Float[Array, "*out"] | StackMember | None = None,
    *,
    contract: int = 1,
    prologue: Prologue | None = None,
    residual: Float[Array, "*result"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*result"]:
    """Contracts x's last `contract` axes with w's first, and adds bias and residual.

        y[..., out] = sum over in of prologue(x)[..., in] * w[in, out]
                      + bias[out] + residual[..., out]

    Accumulates in float32; returns x's dtype. Several in or out axes are taken as one: w's
    remaining axes become y's last axes.

    Args:
        x: [..., *in]; where the prologue gates, [..., 2, in].
        w: [*in, *out], in any width; some formats round x as they say. One of a stack is read where
            it lies by the backends that can, and copied by the others.
        bias: [*out] or None.
        contract: number of axes in `*in`.
        prologue: a norm or an activation of the rows, which a kernel does while it reads them.
        residual: [..., *out], what the result is added to; or None.
        num_rows: how many leading rows of x, its batch axes taken as one, are real; None is all.
            The other rows of the result mean nothing, and the native kernel does not compute them.
        implementation: "reference", "xla", "native", "pallas", or None for the platform's best.

    Raises:
        ValueError: the contracted axes differ.
        RequestError: the named implementation is not here, or does not take these arguments.
    """
    taken = contract + (prologue is not None and getattr(prologue, "gated", False))
    split = x.ndim - taken
    in_shape, out_shape = w.shape[:contract], w.shape[contract:]
    if x.shape[x.ndim - contract :] != in_shape:
        raise ValueError(f"x ends in {x.shape[x.ndim - contract :]}, but w begins with {in_shape}")
    rows = x.reshape(-1, math.prod(x.shape[split:]))
    y = matmul(
        as_operand(w, contract=contract),
        rows,
        None if bias is None else bias.reshape(-1),
        prologue=prologue,
        residual=None if residual is None else residual.reshape(rows.shape[0], -1),
        num_rows=num_rows,
        implementation=implementation,
    )
    return y.reshape(*x.shape[:split], *out_shape)


def matmul(
    w: Operand,
    x: Float[Array, "rows width"],
    bias: Float[Array, " out"] | StackMember | None = None,
    *,
    prologue: Prologue | None = None,
    residual: Float[Array, "rows out"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """`linear` of rows, in `dtype`; None is x's."""
    dtype = x.dtype if dtype is None else dtype
    if isinstance(w, Branch):  # its stacks have some layers, and those of vectors have all
        bias, prologue = taken(bias), taken_prologue(prologue)
    options: dict[str, Any] = {"prologue": prologue, "residual": residual, "num_rows": num_rows}
    options["dtype"] = dtype
    if isinstance(w, Branch):
        return w.branch(lambda one: matmul(one, x, bias, implementation=implementation, **options))
    if isinstance(w, Composite):
        return w.matmul(x, bias, implementation=implementation, **options)
    if isinstance(w, Fused):
        biases, options["residual"] = w.apart(taken(bias)), None
        each = zip(w.parts, biases, strict=True)
        options["implementation"] = implementation
        y = w.together([matmul(part, x, bias, **options) for part, bias in each])
        return y if residual is None else y + residual
    stack, index = w.in_stack()
    args = LinearArgs(x, stack, index, bias, prologue, residual, num_rows, dtype)
    return LINEAR(implementation, args)


@parts.matmuls
def unembed(
    x: Float[Array, "*batch hidden"],
    table: Float[Array, "vocab hidden"] | Operand,
    *,
    prologue: Norm | None = None,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch vocab"]:
    """Logits: x, normalised, times the transposed embedding; accumulated and returned in float32.

    A table that is a weight has hidden as inputs and the vocabulary as outputs. For `num_rows` see
    `linear`.
    """
    logits = matmul(
        as_table(table),
        x.reshape(-1, x.shape[-1]),
        prologue=prologue,
        num_rows=num_rows,
        dtype=jnp.float32,
        implementation=implementation,
    )
    return logits.reshape(*x.shape[:-1], -1)


def lookup(
    table: Float[Array, "vocab hidden"] | Operand,
    index: Int[Array, "*batch"],
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch hidden"]:
    """Rows of an embedding table, in float32 if it is quantised or read by a kernel, else as it is.

    An index outside the table takes its nearest row; the native kernel raises instead. No gradient
    goes through a kernel. For `num_rows` see `linear`.
    """
    options = {"num_rows": num_rows, "implementation": implementation}
    return take(as_table(table), index.reshape(-1), **options).reshape(*index.shape, -1)


def take(
    w: Operand,
    ids: Int[Array, " n"],
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "n in"]:
    """The weights of single outputs: `lookup` of a list."""
    options = {"num_rows": num_rows, "implementation": implementation}
    if isinstance(w, Branch):
        return w.branch(lambda one: take(one, ids, **options))
    if isinstance(w, Composite):
        return w.take(ids, **options)
    one = cast(StoredOperand, taken(w))
    if (rows := one.plain_rows) is None:
        return one.take(ids)
    return LOOKUP(implementation, rows, ids, num_rows)


def _rows(table: Array, index: Array, num_rows: object) -> Array:
    del num_rows  # padding is looked up like the rest
    return table.at[index].get(mode="clip")


LOOKUP = Operation(
    "lookup",
    {"reference": Backend(_rows), "xla": Backend(_rows), "native": Backend(cpu.rows)},
)
