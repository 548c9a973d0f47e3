"""Matmuls with quantised weights on a GPU: few rows by a kernel that reads them at their width.

Decoding reads every weight once per step, so a matmul of few rows is bound by memory, and a weight
that is upcast on the way is lost time. The kernel (Mosaic GPU) takes the packed words as they lie:
a warpgroup has a panel of 16 outputs and a range of its rows of words, unpacks in registers with
integer operations, and sums in float32; `split` ranges of one panel are summed behind it. Rows of
activations come as the format rounds them, in float32.

Matmuls of many rows belong to the tensor cores: codes that bfloat16 or int8 holds exactly are
multiplied as that, scaled behind the sum; the other formats are left to XLA.

Interpret mode shows that the kernel means what the reference says; lowering and assembling for
sm_90a show that it compiles. No GPU has run it yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.dispatch import Backend
from rooflax.ops.formats import PANEL
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import Quantized, Stored, int8_codes, packing_of
from rooflax.ops.weights.matrix_packing import e8m0

MOST_ROWS = 16
"""Rows up to which the kernel is used."""
ROWS_AT_ONCE = 8
"""Rows that share one unpacking by rule; more are taken in turn, from the cache."""
ENOUGH_PROGRAMS = 1056
"""Eight warpgroups for each of an H200's 132 multiprocessors: below it a panel's rows are split."""
TILE = 32
"""Rows of words a warpgroup takes at a time."""

ONE_AND_UP = 0x4B000000
"""The bits of 2^23: a small integer put into its mantissa is that integer above it."""


@dataclass(frozen=True)
class Code:
    """How codes lie in the words of a format.

    Attributes:
        words: words of one row of a panel's output, each for `slots // words` inputs.
        slots: inputs of one row.
        scale: what unpacked codes are too small by.
        in_place: unpacked codes are too large by the place of theirs in a half word.
    """

    words: int
    slots: int
    scale: float = 1.0
    in_place: bool = True

    def factors(self) -> np.ndarray:
        """Of each slot's inputs, where its codes are taken as they lie."""
        factors = np.ones(self.slots, np.float32)
        for word, place in np.ndindex(self.words, self.slots // self.words):
            if self.in_place:
                factors[self.input_of(word, place)] = 2.0 ** -(_shift(place) % 16)
        return factors

    def input_of(self, word: int, place: int) -> int:
        """Which input of its row a place of a word is: bytes first, high nibbles after low ones."""
        half, byte = divmod(place, 4)
        return 16 * half + 4 * word + byte


CODES = {
    "int8": Code(4, 16),
    "fp8": Code(4, 16, 256.0, in_place=False),
    "int8-g32": Code(8, 32),
    "int4": Code(4, 32),
    "mxfp4": Code(4, 32, 4.0, in_place=False),
}


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    """One of a stack is read where it lies by few rows."""
    w: Any = args.w

    def multiply(x: jax.Array) -> jax.Array:
        if len(x) > MOST_ROWS:
            return wide_matmul(x, cast(Quantized, args.matrix)).astype(jnp.float32)
        member = jnp.zeros(1, jnp.int32) if args.index is None else jnp.reshape(args.index, 1)
        return tiled_matmul(x.astype(jnp.float32)[None], w, member, jnp.ones(1, jnp.int32))[0]

    return args.unfused(multiply)


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


def tiled_matmul(
    x: Float[Array, "tiles rows in"],
    w: Quantized,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
) -> Float[Array, "tiles rows out"]:
    """x[t] @ w[members[t]] for the first `num_tiles` tiles; what stands behind them is undefined.

    Args:
        x: float32, not rounded yet.
        w: one matrix, or a stack of which only the members asked for are read.
    """
    code, words = CODES[w.code], _words(w, CODES[w.code])
    count, rows, _ = x.shape
    rounded = w.activations(x.reshape(count * rows, w.inner))
    slots = _by_slot(rounded.reshape(count, rows, w.inner), code, words.shape[-3])
    scales = w.scales.reshape(-1, PANEL) if w.grouped else jnp.zeros((1, PANEL), jnp.float32)
    sums = _sums(words, slots, scales, members, num_tiles, w.code)
    if not w.grouped:
        of_member = w.scales.reshape(-1, w.scales.shape[-1])[members] if w.stack else w.scales[None]
        sums = sums * of_member[:, None, :]
    return sums[..., : w.outer]


def _words(w: Quantized, code: Code) -> Int[Array, "members panels rows words 16"]:
    """The packed bytes, four to an int32, which is no work on a GPU."""
    values = w.values
    if not w.grouped:
        rows = values.shape[-3] // code.words
        values = values.reshape(*values.shape[:-3], rows, code.words, PANEL, 4)
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    return words.reshape(-1, *words.shape[-4:])


def _by_slot(
    x: Float[Array, "tiles rows in"], code: Code, word_rows: int
) -> Float[Array, "tiles rows slots padded"]:
    """Inputs of the same place in their row beside each other, padded to whole tiles; behind them
    the last tile once more with a tile of zeros before it, for who has to begin earlier.
    """
    x = x.reshape(*x.shape[:2], word_rows, code.slots).swapaxes(-1, -2)
    x = x * jnp.asarray(code.factors())[None, None, :, None]
    behind = -word_rows % TILE
    last = jnp.pad(x[..., word_rows + behind - TILE :], ((0, 0),) * 3 + ((TILE, behind),))
    return jnp.concatenate([jnp.pad(x, ((0, 0),) * 3 + ((0, behind),)), last], axis=-1)


def _sums(
    words: Int[Array, "members panels rows words 16"],
    x: Float[Array, "tiles few slots padded"],
    scales: Array,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
    name: str,
) -> Float[Array, "tiles few outputs"]:
    """The kernel and the sum over its splits."""
    from rooflax.ops.mosaic import filled, launch, load, pl, store, words_layout

    code, layout, shape = CODES[name], words_layout(), (TILE, PANEL)
    _, panels, word_rows, _, _ = words.shape
    count, few = x.shape[:2]
    all_rows = math.prod(words.shape[:3])
    steps = -(-word_rows // TILE)
    splits, at_once = block_sizes.of(
        "linear.gpu",
        (rounded_up(count), rounded_up(few), word_rows * code.slots, panels * PANEL, name),
        (_splits(count * panels, steps), ROWS_AT_ONCE),
        _candidates(steps, few),
    )
    per_split = -(-steps // splits)
    turns = -(-few // at_once)
    shared = -(-few // turns)  # rows of a turn; the last turn repeats what it lacks

    def body(words_ref, x_ref, scales_ref, members_ref, num_tiles_ref, out_ref) -> None:
        tile, panel, split = (jax.lax.axis_index(axis) for axis in ("tile", "panel", "split"))

        @pl.when(tile < num_tiles_ref[0])
        def _() -> None:
            first_row = (members_ref[tile] * panels + panel) * word_rows

            def step(index: jax.Array, sums: list[jax.Array], rows: list[Any]) -> list[jax.Array]:
                wanted = first_row + index * TILE
                start = jnp.minimum(wanted, all_rows - TILE)  # the last panel has nothing behind it
                again = (steps + 1) * TILE - (wanted - start)
                inputs = pl.ds(jnp.where(start < wanted, again, index * TILE), TILE)
                parts = [filled(shape, 0.0, layout) for _ in rows]
                loaded = [
                    load(words_ref.at[pl.ds(start, TILE), word], layout)
                    for word in range(code.words)
                ]
                for word, packed in enumerate(loaded):
                    for place in range(code.slots // code.words):
                        numbers = UNPACK[name](packed, place)
                        slot = code.input_of(word, place)
                        for at, row in enumerate(rows):
                            column = load(x_ref.at[tile, row, slot, inputs], layout.reduce(1))
                            parts[at] += numbers * jax.lax.broadcast_in_dim(column, shape, (0,))
                if name not in SCALE:
                    return [total + part for total, part in zip(sums, parts, strict=True)]
                scale = SCALE[name](load(scales_ref.at[pl.ds(start, TILE)], layout))
                return [total + part * scale for total, part in zip(sums, parts, strict=True)]

            def take(rows: list[Any]) -> None:
                begin = split * per_split
                end = jnp.minimum(begin + per_split, steps)
                zeros = [filled(shape, 0.0, layout) for _ in rows]
                sums = jax.lax.fori_loop(begin, end, partial(step, rows=rows), zeros)
                for at, row in enumerate(rows):
                    store(out_ref.at[tile, split, row, panel], sums[at].sum(axis=0))

            def take_turn(turn: Any, carry: Any) -> Any:
                take([jnp.minimum(turn * shared + at, few - 1) for at in range(shared)])
                return carry

            if turns == 1:
                take(list(range(few)))
            else:  # one turn's code for all: unrolled, it is too much for Mosaic's passes
                jax.lax.fori_loop(0, turns, take_turn, 0)

    out = jax.ShapeDtypeStruct((count, splits, few, panels, PANEL), jnp.float32)
    grid = {"panel": panels, "split": splits, "tile": count}
    flat = words.reshape(all_rows, code.words, PANEL)
    partial_sums = launch(body, out, grid)(flat, x, scales, members, num_tiles)
    total = partial_sums[:, 0] if splits == 1 else partial_sums.sum(axis=1)
    return total.reshape(count, few, panels * PANEL) * np.float32(code.scale)


def _splits(programs: int, steps: int) -> int:
    """Into how many ranges a panel's rows go, so that the whole card has something to read."""
    return max(1, min(steps, -(-ENOUGH_PROGRAMS // programs)))


def _candidates(steps: int, few: int) -> list[tuple[int, int]]:
    """Splits of a panel's rows, and rows at once: as the rule says, or half of that."""
    half = ROWS_AT_ONCE // 2
    at_once = [ROWS_AT_ONCE, half] if few > half else [ROWS_AT_ONCE]
    return [(splits, rows) for splits in powers_of_two(steps) for rows in at_once]


def _int8(packed: jax.Array, place: int) -> jax.Array:
    packed, at = _in_reach(packed, _shift(place))
    bits = (packed & (0xFF << at)) ^ (ONE_AND_UP | 0x80 << at)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + (128 << at))


def _int4(packed: jax.Array, place: int) -> jax.Array:
    packed, at = _in_reach(packed, _shift(place))
    bits = (packed & (0xF << at)) | ONE_AND_UP
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + (8 << at))


def _in_reach(packed: jax.Array, shift: int) -> tuple[jax.Array, int]:
    """A code is taken where it lies in the lower half word: the number is 2^at too large, and its
    input as much smaller.
    """
    return (packed, shift) if shift < 16 else (packed >> 16, shift - 16)


def _mxfp4(packed: jax.Array, place: int) -> jax.Array:
    """e2m1 / 4: its exponent and mantissa where float32 has them, over an exponent of 124."""
    at_top = packed << (28 - _shift(place))
    return _float((at_top >> 6) & 0x01C00000 | 124 << 23, at_top, 0.25)


def _fp8(packed: jax.Array, place: int) -> jax.Array:
    """e4m3 / 256: its exponent and mantissa where float32 has them, over an exponent of 112."""
    at_top = packed << (24 - 8 * place)
    return _float((at_top >> 4) & 0x07F00000 | 112 << 23, at_top, 2.0**-14)


def _float(bits: jax.Array, sign: jax.Array, smallest: float) -> jax.Array:
    """A small float's value, its bits lying in float32: 2 x - smallest below its smallest normal
    number, where the one in front of the mantissa is gone. Its sign is `sign`'s highest bit.
    """
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    x = jnp.minimum(2 * x - smallest, x)
    signed = jax.lax.bitcast_convert_type(x, jnp.int32) ^ (sign & -0x80000000)
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


def _shift(place: int) -> int:
    """Of the code at a place: four bytes or their low halves, then four high ones."""
    half, byte = divmod(place, 4)
    return 8 * byte + 4 * half


UNPACK = {"int8": _int8, "int8-g32": _int8, "int4": _int4, "mxfp4": _mxfp4, "fp8": _fp8}
SCALE = {
    "int8-g32": lambda scales: scales.astype(jnp.float32),
    "int4": lambda scales: scales.astype(jnp.float32),
    "mxfp4": e8m0,
}


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
