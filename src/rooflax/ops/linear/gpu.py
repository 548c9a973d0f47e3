"""Matmuls with quantised weights on a GPU: few rows by a kernel that reads them at their width.

Decoding reads every weight once per step, so a matmul of few rows is bound by memory, and a weight
that is upcast on the way is lost time. The kernel (Mosaic GPU, gpu_rows.py) takes the packed words
as they lie; gpu_codes.py says how each code meets the activations.

Matmuls of many rows belong to the tensor cores: codes that bfloat16 or int8 holds exactly are
multiplied as that, scaled behind the sum; the other formats are left to XLA.

Interpret mode shows that the kernel means what the reference says; lowering and assembling for
sm_90a show that it compiles. No GPU has run it yet.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend
from rooflax.ops.formats import PANEL
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.gpu_codes import CODES
from rooflax.ops.linear.gpu_rows import TILE, Rows, tiled_matmul
from rooflax.ops.weights import Quantized, Stored, int8_codes, packing_of, taken

MOST_ROWS = 16
"""Rows up to which the kernel is used."""


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    """One of a stack is read where it lies by few rows."""
    w: Any = args.w

    if len(args.x) > MOST_ROWS:
        wide = partial(wide_matmul, w=cast(Quantized, args.matrix))
        return args.unfused(lambda x: wide(x).astype(jnp.float32))
    member = jnp.zeros(1, jnp.int32) if args.index is None else jnp.reshape(args.index, 1)
    bias: jax.Array | None = taken(args.bias)
    rows = Rows(
        args.x[None],
        args.x.dtype,
        args.prologue,
        bias=None if bias is None else bias[None],
        residual=None if args.residual is None else args.residual[None],
        result=args.dtype,
    )
    return tiled_matmul(rows, w, member, jnp.ones(1, jnp.int32))[0]


def unsupported(args: LinearArgs) -> str | None:
    w, dtype = args.w, args.x.dtype
    if why := unreadable(w):
        return why
    if len(args.x) <= MOST_ROWS:
        return None
    # Scales of groups of int8 and int4 codes are not bfloat16's, nor are activations that are
    # rounded per group, nor float32 ones.
    if w.code in ("int4", "int8-g32") or (w.code == "mxfp4" and w.quantizes_activations):
        return f"linear's GPU kernel is for {MOST_ROWS} rows of {cast(Quantized, w).format}"
    if not w.quantizes_activations and dtype != jnp.bfloat16:
        return f"linear's tensor cores take bfloat16 rows, not {dtype}"
    return None


def unreadable(w: Stored) -> str | None:
    """Why the kernel for few rows cannot read a weight, or a stack of them."""
    if w.code not in CODES:
        return "linear's GPU kernel is for quantised weights: XLA has the rest"
    if w.packing != "panels":
        return "linear's GPU kernel reads panels, not matrices"
    slots = CODES[w.code].slots
    if w.inner % slots:
        return f"linear's GPU kernel takes inputs by {slots}, not {w.inner}"
    if math.prod(w.stack) * -(-w.outer // PANEL) * (w.inner // slots) < TILE:
        return f"linear's GPU kernel needs a larger weight than {w.shape}"
    return None


def wide_matmul(x: Float[Array, "rows in"], w: Quantized) -> Float[Array, "rows out"]:
    """Many rows of one matrix, by tensor cores, where they lose nothing: see `unsupported`."""
    name, outer, inner = w.code, w.outer, w.inner
    if name == "mxfp4":
        return _dot(x, w.numbers().astype(jnp.bfloat16), jnp.float32)
    codes = w.values.swapaxes(-3, -2).reshape(w.values.shape[0] * PANEL, -1)[:outer, :inner].T
    if name == "fp8":
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    if not w.quantizes_activations:
        return _dot(x, codes.astype(jnp.bfloat16), jnp.float32) * w.scales[None, :outer]
    whole, step = int8_codes(x.astype(jnp.float32))
    sums = _dot(whole.astype(jnp.int8), codes, jnp.int32).astype(jnp.float32)
    return sums * step * w.scales[None, :outer]


def _dot(a: jax.Array, b: jax.Array, sums: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=sums)


BACKEND = Backend(matmul, unsupported, reads_stacks=lambda leaf: packing_of(leaf) == "panels")
