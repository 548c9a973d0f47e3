"""Matmuls on a GPU: few rows read each weight once, and none is ever in memory at another width.

Decoding reads every weight once per step, so a matmul of few rows is bound by memory, and a weight
that is upcast on the way is lost time. The kernel for few rows (Mosaic GPU, gpu_rows.py) takes the
packed words as they lie; gpu_codes.py says how each code meets the activations. Plain weights have
a kernel of their own (gpu_plain.py), with the same norm, gate, bias and residual in it.

Matmuls of more rows belong to the tensor cores: gpu_tiles.py upcasts the words in registers, one
operand of the tensor cores after the other; gpu_plain_tiles.py has up to 16 rows of plain weights
in bfloat16. Activations that int8 formats round are multiplied as int8, and more rows with plain
weights too, by XLA.

Interpret mode shows that the kernels mean what the reference says; lowering and assembling for
sm_90a show that they compile; docs/gpu.md has what a card showed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.dispatch import Backend
from rooflax.ops.format_names import PANEL
from rooflax.ops.linear import gpu_plain, gpu_plain_tiles, gpu_rows, gpu_tiles
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.gpu_codes import CODES, Floats
from rooflax.ops.linear.gpu_rows import TILE, Rows
from rooflax.ops.linear.prologue import applied
from rooflax.ops.weights import Quantized, StoredOperand, int8_codes, packing_of, taken

MOST_ROWS = 16
"""Rows up to which the kernel for few rows is used."""
FEW_ROWS = 8
"""Rows up to which it is used of plain weights. Several rows of others go to the tensor cores where
these take them: eight rows of int8 take 22 microseconds there, and 43 here (docs/gpu.md)."""


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    """One of a stack is read where it lies."""
    w: Any = args.w
    member = jnp.zeros(1, jnp.int32) if args.index is None else jnp.reshape(args.index, 1)
    bias: jax.Array | None = taken(args.bias)
    if gpu_plain_tiles.unsupported(args.x, w) is None and _prefers_tensor_cores(args):
        y = gpu_plain_tiles.matmul(applied(args.prologue, args.x), w, member)
        y = y if bias is None else y + bias.astype(jnp.float32)[None]
        y = y.astype(args.dtype)
        return y if args.residual is None else y + args.residual
    if w.code != "matrix" and _no_tensor_cores(args) is None and _prefers_tensor_cores(args):
        x = applied(args.prologue, args.x)
        y = gpu_tiles.matmul(x, w, member, bias, args.dtype)
        return y if args.residual is None else y + args.residual
    if len(args.x) > MOST_ROWS:
        wide = partial(int8_matmul, w=cast(Quantized, args.matrix))
        return args.unfused(wide)
    rows = Rows(
        args.x[None],
        args.x.dtype,
        args.prologue,
        bias=None if bias is None else bias[None],
        residual=None if args.residual is None else args.residual[None],
        result=args.dtype,
    )
    return few_matmuls(rows, w, member, jnp.ones(1, jnp.int32))[0]


def _prefers_tensor_cores(args: LinearArgs) -> bool:
    """Whether they multiply what CUDA cores could, too: several rows by rule, and a card may show
    otherwise; of codes that become floats there, one row where a card has shown it."""
    rows, w = len(args.x), args.w
    if rows > (FEW_ROWS if w.code == "matrix" else 1):
        return True
    if w.code != "matrix" and not isinstance(CODES[w.code], Floats):
        return False
    shape = block_sizes.rounded_up(rows), w.inner, w.outer, w.code
    rule = (int(rows > 1),)
    return block_sizes.of("linear.gpu tensor cores", shape, rule, [(1,), (0,)]) == (1,)


def few_matmuls(
    rows: Rows, w: StoredOperand, members: Int[Array, " tiles"], num_tiles: Int[Array, " one"]
) -> Float[Array, "results rows out"]:
    """Matmuls of tiles of few rows, with members of a stack that is `readable`."""
    run: Any = gpu_plain.tiled_matmul if w.code == "matrix" else gpu_rows.tiled_matmul
    return run(rows, w, members, num_tiles)


def unsupported(args: LinearArgs) -> str | None:
    w = args.w
    if why := unreadable(w):
        return why
    if w.code == "matrix":
        if len(args.x) <= FEW_ROWS or gpu_plain_tiles.unsupported(args.x, w) is None:
            return None
        return f"linear's GPU kernel takes {FEW_ROWS} rows of plain weights: XLA has the rest"
    if len(args.x) <= MOST_ROWS or (w.code == "int8" and w.quantizes_activations):
        return None
    return _no_tensor_cores(args)


def _no_tensor_cores(args: LinearArgs) -> str | None:
    """Reason why the kernel for many rows does not run; None if it does."""
    w = cast(Quantized, args.w)
    if w.quantizes_activations:
        return f"linear's GPU kernel is for {MOST_ROWS} rows of {w.format}"
    if args.x.dtype != jnp.bfloat16:
        return f"linear's tensor cores take bfloat16 rows, not {args.x.dtype}"
    return gpu_tiles.unsupported(w)


def unreadable(w: StoredOperand) -> str | None:
    """Reason why the kernel for few rows cannot read a weight, or a stack of them."""
    if w.code not in CODES:
        return gpu_plain.unsupported(w)
    if w.packing != "panels":
        return "linear's GPU kernel reads panels, not matrices"
    num_inputs = CODES[w.code].num_inputs
    if w.inner % num_inputs:
        return f"linear's GPU kernel takes inputs by {num_inputs}, not {w.inner}"
    if math.prod(w.stack) * -(-w.outer // PANEL) * (w.inner // num_inputs) < TILE:
        return f"linear's GPU kernel needs a larger weight than {w.shape}"
    return None


def int8_matmul(x: Float[Array, "rows in"], w: Quantized) -> Float[Array, "rows out"]:
    """Many rows of one matrix of w8a8, whose products are summed exactly."""
    outer, inner = w.outer, w.inner
    codes = w.values.swapaxes(-3, -2).reshape(w.values.shape[0] * PANEL, -1)[:outer, :inner].T
    whole, step = int8_codes(x.astype(jnp.float32))
    options = {"preferred_element_type": jnp.int32}
    sums = jax.lax.dot_general(whole.astype(jnp.int8), codes, (((1,), (0,)), ((), ())), **options)
    return sums.astype(jnp.float32) * step * w.scales[None, :outer]


BACKEND = Backend(matmul, unsupported, reads_stacks=lambda leaf: packing_of(leaf) != "matrix")
