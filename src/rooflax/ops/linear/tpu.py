"""Matmuls of quantised weights on TPU: codes reach VMEM at their width and are upcast there.

XLA for TPU writes weights of four bits to memory at their full width before it multiplies, which
moves many times their bytes; weights of one scale per output it widens inside the matmul, as this
does. Unquantised weights are rejected: XLA's own matmul reads them once already.

Operands are multiplied in bfloat16, which loses nothing: codes are bfloat16 numbers, and so is an
MXFP4 number with its power of two; float32 activations are three bfloat16 numbers each. Scales of
groups (int4, int8-g32) are not, so that they multiply the sums of their groups. Activations that
are rounded per row are multiplied int8 by int8. Sums are float32, or exact.

Interpreted it equals its reference, and Mosaic accepts it; no TPU has run it (see ops.tpu).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from rooflax.ops import tpu
from rooflax.ops.dispatch import Backend
from rooflax.ops.format_names import GROUP
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.tiles import LANES, up_to
from rooflax.ops.tpu import dot
from rooflax.ops.weights import Quantized, StoredOperand, int8_codes, packing_of
from rooflax.ops.weights.matrix_packing import as_matrix, e8m0

LARGEST_TILE = 256
ROWS = 16
"""Rows of a tile of bfloat16 in registers: copies of as many lie behind each other as they are."""
SCALED = ("int4", "int8-g32")
"""Codes whose scales multiply sums of groups."""
NIBBLES = ("int4", "mxfp4")
GROUPED = ("int8-g32", *NIBBLES)
DECODED = ("int8", "fp8", *GROUPED)
"""Codes that `_weights` knows."""


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    def run(x: jax.Array) -> jax.Array:
        w, member = stack_of(args.w, args.index)
        tile = min(up_to(x.shape[0], ROWS), LARGEST_TILE)
        num_tiles = -(-x.shape[0] // tile)
        members = jnp.broadcast_to(jnp.reshape(member, 1), (num_tiles,))
        padded = jnp.pad(x, ((0, num_tiles * tile - x.shape[0]), (0, 0)))
        return tiled_matmul(padded, w, members, num_tiles=None, tile=tile)[: x.shape[0]]

    return args.unfused(run)


def unsupported(args: LinearArgs) -> str | None:
    if args.w.code in DECODED:
        return None
    return (
        f"linear's TPU kernel is for quantised weights, and this one is {args.w.dtype}: XLA's "
        f"matmul reads it once already"
    )


def stack_of(w: StoredOperand, index: jax.Array | None) -> tuple[StoredOperand, jax.Array]:
    """The stack that the kernel reads and a member's number there; what it cannot read where it
    lies is copied out."""
    if index is None:
        return w, jnp.int32(0)
    return (w, index) if w.packing == "matrix" else (w.member(index), jnp.int32(0))


def tiled_matmul(
    x: Float[Array, "rows in"],
    w: StoredOperand,
    members: Int[Array, " tiles"],
    *,
    num_tiles: Int[Array, ""] | None,
    tile: int,
) -> Float[Array, "rows out"]:
    """Tiles of rows, each times its member of a stack, in float32; no other member is read.

    Args:
        w: without a stack its only member is 0.
        members: of each tile.
        tile: rows, by 16.
        num_tiles: how many are computed; None is all. The rows of the others mean nothing.
    """
    arrays, steps = w.arrays[:1], None
    if w.code in DECODED:
        packed = as_matrix(cast(Quantized, w))
        arrays = packed.arrays[:2]
        x, steps = _rounded(x, packed)
    arrays = [tpu.in_place(a.reshape(-1, *a.shape[-2:])) for a in arrays]
    used = jnp.int32(len(members)) if num_tiles is None else num_tiles
    x = _in_chunks(x)[None] if w.code == "int4" else _halves(x) if w.code == "mxfp4" else x[None]
    y = _run(members, used, x, arrays, w.code, tile)
    return y if steps is None else y * steps


def _rounded(x: jax.Array, w: Quantized) -> tuple[jax.Array, jax.Array | None]:
    """Rows as the format's matmul takes them; whole numbers come with the sizes of their steps."""
    if not w.quantizes_activations:
        return x, None
    x = x.astype(jnp.float32)
    if w.grouped:
        return w.activations(x), None
    codes, steps = int8_codes(x)
    return codes.astype(jnp.int8), steps


def _halves(x: Num[Array, "rows in"]) -> Num[Array, "2 rows half"]:
    """Inputs for the low and for the high halves of a nibble weight's bytes."""
    groups = x.reshape(x.shape[0], -1, 2, GROUP // 2)
    return jnp.moveaxis(groups, 2, 0).reshape(2, x.shape[0], -1)


def _in_chunks(x: Num[Array, "rows in"]) -> Num[Array, "rows in"]:
    """As the kernel has a chunk of int4: of its groups all that meets low halves of bytes, then all
    that meets high ones."""
    whole = x.shape[1] // LANES * LANES

    def halves_first(part: jax.Array) -> jax.Array:
        size = min(part.shape[1], LANES)
        halves = part.reshape(len(part), -1, size // GROUP, 2, GROUP // 2)
        return halves.swapaxes(2, 3).reshape(part.shape)

    parts = [part for part in (x[:, :whole], x[:, whole:]) if part.shape[1]]
    return jnp.concatenate([halves_first(part) for part in parts], axis=1)


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
    sizes = tpu.matmul_tiles(len(members), tile, width * halves, outer, code)
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

        num_groups = x.shape[0] * x.shape[2] // GROUP  # padding is behind them
        grouped = scales[0][0, :num_groups] if code in GROUPED else None
        if code in SCALED:
            sums[...] += _scaled(x[0], partial(_codes, code, values), grouped, code == "int4")
        else:
            for half, part in enumerate(_weights(code, values[0], grouped)):
                for rows in _operands(x[half], part.dtype, code):
                    sums[...] += dot(rows, part.astype(rows.dtype), PRODUCT)

        @pl.when(turn == pl.num_programs(2) - 1)
        def _() -> None:
            total = sums[...].astype(jnp.float32)
            out[...] = total * scales[0][0] if code in ("int8", "fp8") else total


PRODUCT = (((1,), (0,)), ((), ()))


def _operands(x: Any, dtype: Any, code: str) -> list[Any]:
    """Operands to multiply, one after the other, with weights of a type.

    Args:
        dtype: of what stands for the weights, which bfloat16 holds unless they are unquantised.
    """
    if x.dtype == jnp.int8 or (code == "matrix" and dtype != jnp.bfloat16):
        return [x if x.dtype == jnp.int8 else x.astype(jnp.float32)]
    return [part.astype(jnp.bfloat16) for part in _parts(x)]


def _parts(x: Any) -> list[Any]:
    """float32 numbers that bfloat16 holds and whose sum is x: of a float32 the upper eight bits,
    the next eight and the rest."""
    if x.dtype != jnp.float32:
        return [x.astype(jnp.float32)]
    parts = []
    for _ in range(2):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16)
        parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return [*parts, x]


def _scaled(x: Any, codes: Callable[[int, int], Any], scales: Any, in_halves: bool) -> Any:
    """x @ (codes * scales). Of a chunk of inputs the rows come once for each of its groups, with
    zeros for the others', so that its codes are loaded once; the sums are scaled and added.

    Args:
        codes: of inputs from one to another, in bfloat16.
        in_halves: a chunk has the first halves of its groups, then the second ones.
    """
    (rows, width), total = x.shape, None
    for begin in range(0, width, LANES):
        size = min(LANES, width - begin)
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1)
        group = lane >> 5
        if in_halves:
            group = jnp.where(lane < size // 2, lane, lane - size // 2) >> 4
        count, chunk = size // GROUP, codes(begin, begin + size)
        for part in _parts(x[:, begin : begin + size]):
            copies = [jnp.where(group == number, part, 0.0) for number in range(count)]
            sums = dot(jnp.concatenate(copies).astype(jnp.bfloat16), chunk, PRODUCT)
            for number in range(count):
                at = begin // GROUP + number
                of_group = sums[number * rows : (number + 1) * rows] * scales[at : at + 1]
                total = of_group if total is None else total + of_group
    return total


def _codes(code: str, values: Any, begin: int, end: int) -> Any:
    if code == "int8-g32":
        return values[0, begin:end].astype(jnp.float32).astype(jnp.bfloat16)
    q = values[0, begin // 2 : end // 2].astype(jnp.int32)
    halves = [_nibble(code, half) for half in (q & 15, q >> 4)]
    return jnp.concatenate(halves).astype(jnp.bfloat16)


def _weights(code: str, values: Any, scales: Any) -> list[Any]:
    """Values of codes, up to the scale of an output; of nibbles both halves."""
    if code in ("matrix", "int8"):
        return [values]
    q = values.astype(jnp.int32)
    if code == "fp8":
        return [_e4m3(q)]
    factors = _for_each_row(e8m0(scales), GROUP // 2)
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


BACKEND = Backend(matmul, unsupported, reads_stacks=lambda leaf: packing_of(leaf) == "matrix")
