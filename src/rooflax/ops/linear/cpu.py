"""Linear by the native kernel: weights stay at their width, outputs are summed in order of k.

A norm or an activation in front, bias and residual behind are part of the same call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import native
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import Activation, Norm, Prologue
from rooflax.ops.real_rows import NumRows, real_rows
from rooflax.ops.weights import StackMember, StoredOperand, in_place

NATIVE_DTYPES = (jnp.float32, jnp.bfloat16)
ACTIVATIONS = {
    "silu": 3, "swish": 3, "gelu": 4, "gelu_new": 5, "gelu_pytorch_tanh": 5, "relu": 6,
}  # fmt: skip
"""By their numbers in csrc/kernels.h; RMSNorm is 1, LayerNorm 2, the clamped SwiGLU 7."""


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    return selected_matmul(args).astype(args.dtype)


def selected_matmul(
    args: LinearArgs, select: Int[Array, " n"] | None = None
) -> Float[Array, "rows result"]:
    """The kernel's call, in bfloat16 if that is wanted, else in float32.

    Args:
        select: for a w that is a stack of stacks (or one with no `index`): whose weights each row
            (or, with n = 1, every row) has; a bias may have the same leading axis.
    """
    w, in_stack = args.w, args.index is not None
    if args.index is not None and select is not None:
        select = args.index * w.stack[1] + select
        w = w.joined()  # a stack of stacks, as layers of experts, is read as one
    elif args.index is not None:
        select = args.index.reshape(1)
    values, scales, sums = w.arrays
    before, norm = _before(args.prologue, in_stack)
    dtype = args.dtype if args.dtype in NATIVE_DTYPES else jnp.float32
    call = jax.ffi.ffi_call(
        "rooflax_matmul", jax.ShapeDtypeStruct((args.x.shape[0], w.outer), dtype)
    )
    return call(
        _native(args.x),
        values if w.packing else _native(values),
        scales,
        sums,
        _vector(args.bias, in_stack),
        _none(jnp.float32) if args.residual is None else args.residual.astype(dtype),
        *norm,
        _none(jnp.int32) if select is None else select,
        real_rows(args.num_rows),
        layout=np.int64(native.layout(w.code)),
        bytes=np.int64(_rounding(w)),
        narrow=np.int64(args.x.dtype == jnp.bfloat16),
        **before,
    )


def numbers(
    w: StoredOperand, index: Int[Array, ""] | None, after: Float[Array, " n"]
) -> Float[Array, "in out"]:
    """`StoredOperand.numbers` of packed codes, or of the member `index` of a stack of them.

    Args:
        after: made before the numbers are; not read.
    """
    call = jax.ffi.ffi_call(
        "rooflax_numbers", jax.ShapeDtypeStruct((w.inner, w.outer), jnp.float32)
    )
    select = _none(jnp.int32) if index is None else jnp.reshape(index, 1).astype(jnp.int32)
    return call(*w.arrays, select, after, layout=np.int64(native.layout(w.code)))


def matmul_transposed(
    x: Float[Array, "rows in"], w: Float[Array, "out in"]
) -> Float[Array, "rows out"]:
    """x times the transpose of w, in float32, of any number of rows.

    Its sums are in another order than those of `matmul`, the same for all numbers of rows.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("rooflax_matmul_transposed", out)
    return call(x.astype(jnp.float32), _native(w))


def _rounding(w: StoredOperand) -> int:
    """Rounding of the kernel's activations, by `Bytes` in csrc/matmul_ffi.cc."""
    if w.num_terms == 2:
        return 3
    return w.quantizes_activations + w.rotates_inputs


def add_adapters(
    x: Float[Array, "rows width"],
    y: Float[Array, "rows out"],
    a: Float[Array, "slots inner wide"] | StackMember,
    b: Float[Array, "slots panels rank lanes"] | StackMember,
    spans: tuple[tuple[int, int, int], ...],
    slots: Int[Array, " rows"],
    prologue: Prologue | None,
    num_rows: NumRows,
) -> Float[Array, "rows out"]:
    """y, in place, with (x A) B of each row's slot: see `adapter_slots.AdapterSlots`."""
    is_stacked = isinstance(a, StackMember)
    before, norm = _before(prologue, is_stacked)
    index = a.index.reshape(1) if isinstance(a, StackMember) else _none(jnp.int32)
    whole = (w.whole if isinstance(w, StackMember) else w for w in (a, b))
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    call = jax.ffi.ffi_call("rooflax_adapters", out, input_output_aliases={1: 0})
    return call(
        _native(x),
        y,
        *norm,
        *whole,
        np.asarray(spans, np.int32).reshape(-1, 3),
        slots,
        index,
        real_rows(num_rows),
        **before,
    )


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


def _vector(vector: jax.Array | StackMember | None, in_stack: bool) -> jax.Array:
    """A bias or a norm's; one of a stack stays there unless all of the stack would be upcast.

    Args:
        in_stack: the matmul's weight is one of such a stack.
    """
    return _optional(in_place(vector, lambda stack: in_stack and stack.dtype == jnp.float32))


def _optional(x: jax.Array | None) -> jax.Array:
    return _none(jnp.float32) if x is None else x.astype(jnp.float32)


def _none(dtype: Any) -> jax.Array:
    """Empty array, the kernel's sign for an absent argument."""
    return jnp.zeros(0, dtype)


def _native(w: jax.Array) -> jax.Array:
    """Numbers as a kernel can read them; others are upcast."""
    return w if w.dtype in NATIVE_DTYPES else w.astype(jnp.float32)


def unsupported(args: LinearArgs) -> str | None:
    return native.unreadable(args.w.code)


BACKEND = Backend(matmul, unsupported, reads_stacks=lambda leaf: True, keeps_bf16=True)
