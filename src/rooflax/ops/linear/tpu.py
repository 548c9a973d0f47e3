"""Products of quantised weights on TPU: codes reach VMEM at their width and are widened there.

XLA for TPU writes weights of four bits to memory at their full width before it multiplies, which
moves many times their bytes; weights of one scale per output it widens inside the product, as this
does. Unquantised weights are refused: XLA's own product reads them once already.

Operands are multiplied in bfloat16 where that loses nothing (MXFP4 and codes of one scale per
output, over bfloat16 activations), int8 by int8 where activations are rounded per row, and else in
float32. Sums are float32, or exact.

Interpreted it equals its reference, and Mosaic accepts it; no TPU has run it (see ops.tpu).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from rooflax.ops import tpu
from rooflax.ops.formats import FORMATS, GROUP
from rooflax.ops.linear.prologue import Norm, Prologue, applied
from rooflax.ops.matrix_packing import as_matrix, e8m0
from rooflax.ops.quantization import QuantizedArray, int8_codes, rounded
from rooflax.ops.stacked import Stacked, taken
from rooflax.ops.tpu import dot

BFLOAT16_HOLDS = ("int8", "fp8", "mxfp4", "matrix")
"""Weights that bfloat16 holds exactly, before the scale of an output. "matrix" is unquantised."""
LARGEST_TILE = 256
NIBBLES = ("int4", "mxfp4")
GROUPED = ("int8-g32", *NIBBLES)


def matmul(
    x: Float[Array, "rows width"],
    w: Float[Array, "in out"] | QuantizedArray | Stacked,
    bias: Float[Array, " out"] | Stacked | None,
    *,
    prologue: Prologue | None = None,
    residual: Float[Array, "rows out"] | None = None,
    num_rows: Any = None,
) -> Float[Array, "rows out"]:
    del num_rows  # padding is computed like the rest
    member = jnp.zeros(1, jnp.int32)
    if isinstance(w, Stacked) and isinstance(w.stack, QuantizedArray) and w.stack.is_matrix:
        w, member = w.stack, w.index.reshape(1)
    y = _whole(applied(prologue, x), taken(w), member)
    bias = taken(bias)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    y = y.astype(x.dtype)
    return y if residual is None else y + residual


def unembed(
    x: Float[Array, "rows hidden"],
    table: Float[Array, "vocab hidden"] | QuantizedArray,
    *,
    prologue: Norm | None = None,
    num_rows: Any = None,
) -> Float[Array, "rows vocab"]:
    del num_rows  # padding is computed like the rest
    return _whole(applied(prologue, x), table, jnp.zeros(1, jnp.int32))


def _whole(x: jax.Array, w: Any, member: Int[Array, " one"]) -> Float[Array, "rows out"]:
    """All rows times one member of a stack."""
    if not isinstance(w, QuantizedArray):
        raise NotImplementedError(
            f"linear's TPU kernel is for quantised weights, and this one is {w.dtype}: XLA's "
            f"product reads it once already."
        )
    tile = min(x.shape[0], LARGEST_TILE)
    num_tiles = -(-x.shape[0] // tile)
    return product(x, w, jnp.broadcast_to(member, (num_tiles,)), num_tiles=None, tile=tile)


def product(
    x: Float[Array, "rows in"],
    w: Float[Array, _ in out] | QuantizedArray,
    members: Int[Array, " tiles"],
    *,
    num_tiles: Int[Array, ""] | None,
    tile: int,
) -> Float[Array, "rows out"]:
    """Tiles of rows, each times its member of a stack, in float32; no other member is read.

    Args:
        w: without a stack its only member is 0.
        members: of each tile.
        num_tiles: how many are computed; None is all. The rows of the others mean nothing.
    """
    if isinstance(w, QuantizedArray):
        format, w = FORMATS[w.format], as_matrix(w)
        x, steps = _rounded(x, w.format)
        code, arrays = format.code, (w.values, w.scales)
    else:
        code, arrays, steps = "matrix", (w,), None
    arrays = [tpu.in_place(a.reshape(-1, *a.shape[-2:])) for a in arrays]
    used = jnp.int32(len(members)) if num_tiles is None else num_tiles
    y = _run(members, used, _halves(x) if code in NIBBLES else x[None], arrays, code, tile)
    return y if steps is None else y * steps


def _rounded(x: jax.Array, format: str) -> tuple[jax.Array, jax.Array | None]:
    """Rows as the format's product takes them; whole numbers come with the sizes of their steps."""
    if not FORMATS[format].rounds:
        return x, None
    x = x.astype(jnp.float32)
    if FORMATS[format].grouped:
        return rounded(x, format), None
    codes, steps = int8_codes(x)
    return codes.astype(jnp.int8), steps


def _halves(x: Num[Array, "rows in"]) -> Num[Array, "2 rows half"]:
    """What meets the low and what meets the high halves of a nibble weight's bytes."""
    groups = x.reshape(x.shape[0], -1, 2, GROUP // 2)
    return jnp.moveaxis(groups, 2, 0).reshape(2, x.shape[0], -1)


def _run(
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, ""],
    x: Num[Array, "halves rows in"],
    arrays: list[jax.Array],
    code: str,
    tile: int,
) -> Float[Array, "rows out"]:
    """The kernel's call. Turns beyond the last tile in use ask for what is there already."""
    (halves, rows, width), outer = x.shape, arrays[0].shape[2]
    sizes = tpu.product_tiles(len(members), tile, width * halves, outer, code)
    turns = width * halves // sizes.inner

    def place(m: Any, k: Any, used: Any) -> tuple[Any, Any]:
        """The tile of rows and the one of inputs that a turn reads."""
        last = jnp.maximum(used[0] - 1, 0)
        return jnp.minimum(m, last), jnp.where(m > last, turns - 1, k)

    def of_rows(n: Any, m: Any, k: Any, members: Any, used: Any) -> tuple[Any, ...]:
        m, k = place(m, k, used)
        return 0, m, k

    def of_weights(n: Any, m: Any, k: Any, members: Any, used: Any) -> tuple[Any, ...]:
        m, k = place(m, k, used)
        return members[m], k, n

    def of_scales(n: Any, m: Any, k: Any, members: Any, used: Any) -> tuple[Any, ...]:
        m, k = place(m, k, used)
        return members[m], (0 if arrays[1].shape[1] == 1 else k), n

    depths = [array.shape[1] // turns or 1 for array in arrays]
    whole_numbers = x.dtype == jnp.int8
    return tpu.call(
        partial(_kernel, code=code),
        jax.ShapeDtypeStruct((rows, outer), jnp.float32),
        grid=(-(-outer // sizes.outer), len(members), turns),
        in_specs=[
            pl.BlockSpec((halves, tile, width // turns), of_rows),
            *(
                pl.BlockSpec((1, depth, sizes.outer), index)
                for depth, index in zip(depths, (of_weights, of_scales), strict=False)
            ),
        ],
        out_specs=pl.BlockSpec((tile, sizes.outer), lambda n, m, *_: (m, n)),
        semantics=("parallel", "arbitrary", "arbitrary"),
        num_scalars=2,
        scratch=(pltpu.VMEM((tile, sizes.outer), jnp.int32 if whole_numbers else jnp.float32),),
        name=f"product_{code}",
    )(members, num_tiles.reshape(1), x, *arrays)


def _kernel(members: Any, used: Any, x: Any, values: Any, *refs: Any, code: str) -> None:
    """One turn: a tile of rows times a tile of a weight, added up over the tiles of inputs."""
    *scales, out, sums = refs
    turn = pl.program_id(2)

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        @pl.when(turn == 0)
        def _() -> None:
            sums[...] = jnp.zeros(sums.shape, sums.dtype)

        narrow = x.dtype != jnp.float32 and code in BFLOAT16_HOLDS
        dtype = x.dtype if narrow else jnp.dtype(jnp.float32)
        num_groups = x.shape[0] * x.shape[2] // GROUP  # padding is behind them
        grouped = scales[0][0, :num_groups] if code in GROUPED else None
        parts = _weights(code, values[0], grouped)
        for half, part in enumerate(parts):
            sums[...] += dot(x[half].astype(dtype), part.astype(dtype), (((1,), (0,)), ((), ())))

        @pl.when(turn == pl.num_programs(2) - 1)
        def _() -> None:
            total = sums[...].astype(jnp.float32)
            out[...] = total * scales[0][0] if code in ("int8", "fp8") else total


def _weights(code: str, values: Any, scales: Any) -> list[Any]:
    """What codes stand for, up to the scale of an output; of nibbles both halves."""
    if code in ("matrix", "int8"):
        return [values]
    q = values.astype(jnp.int32)
    if code == "fp8":
        return [_e4m3(q)]
    if code == "int8-g32":
        return [q.astype(jnp.float32) * _for_each_row(scales, GROUP)]
    factors = _for_each_row(scales if code == "int4" else e8m0(scales), GROUP // 2)
    return [_nibble(code, half) * factors for half in (q & 15, q >> 4)]


def _nibble(code: str, q: Any) -> Any:
    if code == "int4":
        return (q - 8).astype(jnp.float32)
    size = q & 7  # twice e2m1: 0 1 2 3 4 6 8 12
    size = jnp.where(size < 4, size, jnp.where(size < 6, 2 * size - 4, 4 * size - 16))
    return jnp.where(q < 8, size, -size).astype(jnp.float32) * 0.5


def _e4m3(q: Any) -> Any:
    """A byte's value: its exponent moved to float32's, subnormals by hand."""
    size = q & 127
    normal = jax.lax.bitcast_convert_type(size << 20, jnp.float32) * 2.0**120
    value = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(size == 127, jnp.nan, value)
    return jnp.where(q < 128, value, -value)


def _for_each_row(scales: Any, count: int) -> Any:
    """Each row `count` times."""
    groups, outer = scales.shape
    return jnp.broadcast_to(scales[:, None], (groups, count, outer)).reshape(-1, outer)
