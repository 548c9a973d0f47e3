"""Linear by the native kernel: weights stay at their width, outputs are summed in order of k.

A norm or an activation in front, bias and residual behind are part of the same call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.formats import FORMATS
from rooflax.ops.linear.prologue import Activation, Norm, Prologue
from rooflax.ops.quantization import QuantizedArray
from rooflax.ops.real_rows import NumRows, real_rows
from rooflax.ops.stacked import Stacked, taken

NATIVE_DTYPES = (jnp.float32, jnp.bfloat16)
LAYOUTS = ("matrix", "table", "int8", "fp8", "int8-g32", "int4", "mxfp4")
"""In the order of csrc/product_ffi.cc."""
ACTIVATIONS = {
    "silu": 3, "swish": 3, "gelu": 4, "gelu_new": 5, "gelu_pytorch_tanh": 5, "relu": 6,
}  # fmt: skip
"""By their numbers in csrc/kernels.h; RMSNorm is 1, LayerNorm 2, the clamped SwiGLU 7."""


def matmul(
    x: Float[Array, "rows width"],
    w: Float[Array, "in out"] | QuantizedArray | Stacked,
    bias: Float[Array, " out"] | Stacked | None,
    *,
    prologue: Prologue | None = None,
    residual: Float[Array, "rows out"] | None = None,
    num_rows: NumRows = None,
) -> Float[Array, "rows out"]:
    y = product(x, w, bias, prologue=prologue, residual=residual, num_rows=num_rows)
    return y.astype(x.dtype)


def unembed(
    x: Float[Array, "rows hidden"],
    table: Float[Array, "vocab hidden"] | QuantizedArray,
    *,
    prologue: Prologue | None = None,
    num_rows: NumRows = None,
) -> Float[Array, "rows vocab"]:
    return product(x, table, None, layout="table", prologue=prologue, num_rows=num_rows)


def product(
    x: Float[Array, "rows width"],
    w: Float[Array, "*weight"] | QuantizedArray | Stacked,
    bias: Float[Array, "*out"] | Stacked | None,
    *,
    layout: str = "matrix",
    prologue: Prologue | None = None,
    residual: Float[Array, "rows result"] | None = None,
    select: Int[Array, " n"] | None = None,
    num_rows: NumRows = None,
) -> Float[Array, "rows result"]:
    """The kernel's call, in float32.

    Args:
        layout: of an unpacked w: "matrix" is [in, out], "table" [out, in].
        select: for a w with a leading axis: whose weights each row (or, with n = 1, every row)
            has; a bias may have the same leading axis.
        num_rows: see `linear`.
    """
    in_stack = isinstance(w, Stacked)
    if isinstance(w, Stacked):
        w, select = _read_in_place(w, select)
    if isinstance(w, QuantizedArray):
        arrays, outer = (w.values, w.scales, w.sums), math.prod(w.out_shape)
        layout, rounds = FORMATS[w.format].code, FORMATS[w.format].rounds
    else:
        arrays, rounds = (_native(w), _none(jnp.float32), _none(jnp.int32)), False
        outer = w.shape[-1 if layout == "matrix" else -2]
    before, norm = _before(prologue, in_stack)
    call = jax.ffi.ffi_call(
        "rooflax_product", jax.ShapeDtypeStruct((x.shape[0], outer), jnp.float32)
    )
    return call(
        x.astype(jnp.float32),
        *arrays,
        _vector(bias, in_stack),
        _optional(residual),
        *norm,
        _none(jnp.int32) if select is None else select,
        real_rows(num_rows),
        layout=np.int64(LAYOUTS.index(layout)),
        bytes=np.int64(rounds),
        **before,
    )


def _read_in_place(
    w: Stacked, select: jax.Array | None
) -> tuple[jax.Array | QuantizedArray, jax.Array]:
    """A stack and whose weights are meant; stacks of stacks (layers of experts) become one."""
    if select is None:
        return w.stack, w.index.reshape(1)
    select = w.index * w.shape[0] + select
    if not isinstance(w.stack, QuantizedArray):
        return w.stack.reshape(-1, *w.stack.shape[2:]), select
    values = w.stack.values
    return replace(w.stack, values=values.reshape(-1, *values.shape[2:])), select


def rows(
    table: Float[Array, "vocab hidden"], index: Int[Array, " n"], num_rows: NumRows = None
) -> Float[Array, "n hidden"]:
    """Rows of a table in float32; XLA on CPU would upcast all of a bfloat16 table first."""
    out = jax.ShapeDtypeStruct((index.shape[0], table.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("rooflax_rows", out)
    return call(_native(table), index.astype(jnp.int32), real_rows(num_rows))


def _before(
    prologue: Prologue | None, in_stack: bool
) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
    """A prologue as the kernel's attributes, and a norm's arrays."""
    kind, eps, alpha, limit = 0, 0.0, 0.0, 0.0
    weight = bias = None
    if isinstance(prologue, Norm):
        kind, eps = (1 if prologue.bias is None else 2), prologue.eps
        weight, bias = prologue.weight, prologue.bias
    elif isinstance(prologue, Activation):
        kind = ACTIVATIONS[prologue.name]
    elif prologue is not None:
        kind, alpha, limit = 7, prologue.alpha, prologue.limit
    attributes = {
        "before": np.int64(kind),
        "gated": np.int64(getattr(prologue, "gated", False)),
        "eps": np.float32(eps),
        "alpha": np.float32(alpha),
        "limit": np.float32(limit),
    }
    return attributes, (_vector(weight, in_stack), _vector(bias, in_stack))


def _vector(vector: jax.Array | Stacked | None, in_stack: bool) -> jax.Array:
    """A bias or a norm's; one of a stack stays there unless all of the stack would be widened.

    Args:
        in_stack: the product's weight is one of such a stack.
    """
    stack = vector.stack if isinstance(vector, Stacked) and in_stack else None
    if isinstance(stack, jax.Array) and stack.dtype == jnp.float32:
        return stack
    return _optional(taken(vector))


def _optional(x: jax.Array | None) -> jax.Array:
    return _none(jnp.float32) if x is None else x.astype(jnp.float32)


def _none(dtype: Any) -> jax.Array:
    """What the kernel takes for an argument that is not there."""
    return jnp.zeros(0, dtype)


def _native(w: jax.Array) -> jax.Array:
    """Weights as a kernel can read them; other widths are widened."""
    return w if w.dtype in NATIVE_DTYPES else w.astype(jnp.float32)
