"""The linear operation: checks and dispatch."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.accelerator import per_platform
from rooflax.ops.dispatch import choose
from rooflax.ops.linear import cpu, reference, xla
from rooflax.ops.linear.prologue import Norm, Prologue, normalised, unfused
from rooflax.ops.quantization import QuantizedArray, rows_of
from rooflax.ops.stacked import Stacked

IMPLEMENTATIONS = {
    "reference": unfused(reference.matmul),
    "xla": unfused(xla.matmul),
    "native": cpu.matmul,
    "pallas": per_platform("linear", "matmul", gpu=partial(unfused, in_stacks=True)),
}


@parts.matmuls
def linear(
    x: Float[Array, "*batch"],
    w: Float[Array, "*weight"] | QuantizedArray | Stacked,
    bias: Float[Array, "*out"] | Stacked | None = None,
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
        w: [*in, *out], in any width; quantised ones round x as their format says. One of a stack
            is read where it lies by the native kernel, and copied by the others.
        bias: [*out] or None.
        contract: number of axes in `*in`.
        prologue: a norm or an activation of the rows, which a kernel does while it reads them.
        residual: [..., *out], what the result is added to; or None.
        num_rows: how many leading rows of x, its batch axes taken as one, are real; None is all.
            The other rows of the result mean nothing, and the native kernel does not compute them.
        implementation: "reference", "xla", "native", "pallas", or None for the platform's best.

    Raises:
        ValueError: the contracted axes differ.
        NotImplementedError: the named implementation does not exist here.
    """
    taken = contract + (prologue is not None and getattr(prologue, "gated", False))
    split = x.ndim - taken
    in_shape, out_shape = w.shape[:contract], w.shape[contract:]
    if x.shape[x.ndim - contract :] != in_shape:
        raise ValueError(f"x ends in {x.shape[x.ndim - contract :]}, but w begins with {in_shape}")
    matmul = choose("linear", IMPLEMENTATIONS, implementation)
    rows = x.reshape(-1, _size(x.shape[split:]))
    flat_bias = None if bias is None else bias.reshape(-1)
    flat_residual = None if residual is None else residual.reshape(rows.shape[0], -1)
    if not isinstance(w, QuantizedArray):
        w = w.reshape(_size(in_shape), _size(out_shape))
    y = matmul(rows, w, flat_bias, prologue=prologue, residual=flat_residual, num_rows=num_rows)
    return y.reshape(*x.shape[:split], *out_shape)


@parts.matmuls
def unembed(
    x: Float[Array, "*batch hidden"],
    table: Float[Array, "vocab hidden"] | QuantizedArray,
    *,
    prologue: Norm | None = None,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch vocab"]:
    """Logits: x, normalised, times the transposed embedding; accumulated and returned in float32.

    A quantised table contracts hidden: its in_shape is (hidden,), its out_shape (vocab,). For
    `num_rows` see `linear`.
    """
    product = choose("unembed", UNEMBED_IMPLEMENTATIONS, implementation)
    rows = x.reshape(-1, x.shape[-1])
    logits = product(rows, table, prologue=prologue, num_rows=num_rows)
    return logits.reshape(*x.shape[:-1], -1)


def lookup(
    table: Float[Array, "vocab hidden"] | QuantizedArray,
    index: Int[Array, "*batch"],
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch hidden"]:
    """Rows of an embedding table, in float32 if it is quantised or read by a kernel, else as it is.

    An index outside the table takes its nearest row; the native kernel raises instead. No gradient
    goes through a kernel. For `num_rows` see `linear`.
    """
    if isinstance(table, QuantizedArray):
        return rows_of(table, jnp.clip(index, 0, table.out_shape[0] - 1))
    take = choose("lookup", LOOKUP_IMPLEMENTATIONS, implementation)
    return take(table, index.reshape(-1), num_rows).reshape(*index.shape, -1)


LOOKUP_IMPLEMENTATIONS = {"reference": xla.rows, "xla": xla.rows, "native": cpu.rows}
UNEMBED_IMPLEMENTATIONS = {
    "reference": normalised(reference.unembed),
    "xla": normalised(xla.unembed),
    "native": cpu.unembed,
    "pallas": per_platform("linear", "unembed", gpu=normalised),
}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
