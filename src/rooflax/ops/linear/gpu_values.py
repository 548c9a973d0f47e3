"""Activations of few rows on a GPU as the bytes that `gpu_codes` multiplies, in one kernel with
what happens to them before: a norm, or a gated activation.

A warpgroup has 32 groups of one row, four inputs a thread. XLA would launch four kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.prologue import Activation, Norm, Prologue

GROUPS, HALF = 32, 16
"""Groups of a tile, and inputs of one that are loaded at a time."""
SILU = ("silu", "swish")


def fuses(prologue: Prologue | None) -> bool:
    """Whether the kernel does it; the rest is done before."""
    if isinstance(prologue, Norm):
        return prologue.bias is None
    return isinstance(prologue, Activation) and prologue.gated and prologue.name in SILU


def packed_values(
    x: Float[Array, "rows width"],
    slots: int,
    places: list[tuple[int, int]],
    parts: int,
    prologue: Prologue | None,
    *,
    paired: bool,
    offset: int,
) -> Int[Array, "rows count padded"]:
    """Per part the words of each group, the highest part first; and the size of 1.

    Args:
        slots: inputs of a group.
        places: of each word, in which half of a group its inputs are, and which of the half's.
        prologue: one that `fuses`, or None.
        paired: a word has two inputs of the first half and the same two of the second.
        offset: of paired codes: behind the words of a part stand the products with it; 0 is none.

    Returns:
        Whole tiles of groups. Where the last is not full, it comes once more behind one of zeros,
        for who has to begin earlier; zeros are the values of no inputs.
    """
    from rooflax.ops.mosaic import launch, pl, plgpu, spread, store, words_layout
    from rooflax.ops.mosaic import load as load_from
    from rooflax.ops.weights import taken

    gated = isinstance(prologue, Activation)
    copies = 2 if gated else 1
    rows, inner = len(x), x.shape[1] // copies
    groups, halves = inner // slots, slots // HALF
    tiles, layout, shape = -(-groups // GROUPS), words_layout(), (GROUPS, HALF)
    x = x.reshape(rows, copies, groups, slots)
    missing = -groups % GROUPS
    if missing:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
    given = [x]
    if isinstance(prologue, Norm):
        weight = taken(prologue.weight).reshape(groups, slots)
        given.append(jnp.pad(weight, ((0, missing), (0, 0))))
    bits, each = 8 * parts, len(places) + bool(offset)
    all_tiles = tiles + 2 * bool(missing)

    def body(*refs: Any) -> None:
        x_ref, *weights, out_ref = refs
        row, at = (jax.lax.axis_index(axis) for axis in ("row", "tile"))
        tile = jnp.minimum(at, tiles - 1)

        def load(copy: int, tile: Any, half: int) -> jax.Array:
            place = (row, copy, pl.ds(tile * GROUPS, GROUPS), pl.ds(half * HALF, HALF))
            return load_from(x_ref.at[place], layout).astype(jnp.float32)

        def prepared(half: int) -> jax.Array:
            value = load(0, tile, half)
            if gated:
                value = value * jax.lax.logistic(value) * load(1, tile, half)
            if weights:
                place = (pl.ds(tile * GROUPS, GROUPS), pl.ds(half * HALF, HALF))
                value = value * scale * load_from(weights[0].at[place], layout).astype(jnp.float32)
            return value.astype(x.dtype).astype(jnp.float32)

        if weights:

            def square(tile: Any, total: jax.Array) -> jax.Array:
                for half in range(halves):
                    value = load(0, tile, half)
                    total = total + value * value
                return total

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            total = jax.lax.fori_loop(0, tiles, square, zeros).sum(axis=1).sum(axis=0)
            assert isinstance(prologue, Norm)
            scale = jax.lax.rsqrt(total * np.float32(1 / inner) + np.float32(prologue.eps))
        values = [prepared(half) for half in range(halves)]
        largest = abs(values[0]).max(axis=1)
        for value in values[1:]:
            largest = jnp.maximum(largest, abs(value).max(axis=1))
        step, inverse = step_of(largest, bits)
        # zeros behind the last group, and in the tile before the last one is there again
        number = plgpu.broadcasted_iota(jnp.int32, (GROUPS,), 0, layout=layout.reduce(1))
        bound = jnp.where(at == tiles, 0, groups - tile * GROUPS)
        real, inverse = number < bound, jnp.where(number < bound, inverse, 0.0)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        factor = spread(inverse, shape, 0, layout)
        whole = [rounded(value * factor, bits) for value in values]

        def write(at_value: int, value: jax.Array) -> None:
            store(out_ref.at[row, at_value, pl.ds(at * GROUPS, GROUPS)], value)

        for part in range(parts):
            cut = [number >> 8 * (parts - 1 - part) for number in whole]
            cut = [number & 0xFF for number in cut] if part else cut
            if offset:
                total = (cut[0] + cut[1]).sum(axis=1)
                write(part * each + each - 1, total * offset)
            cut = [number & 0xFF for number in cut]
            if paired:
                moved = [cut[0] << 16 * (column & 1) | cut[1] << 16 * (column & 1) + 8]
            else:
                moved = [number << 8 * (column & 3) for number in cut]
            own = column >> (1 if paired else 2)
            for word, (half, place) in enumerate(places):
                mine = jnp.where(own == place, moved[half], 0)
                write(part * each + word, mine.sum(axis=1))
        bits_of_step = jax.lax.bitcast_convert_type(step, jnp.int32)
        write(parts * each, jnp.where(real, bits_of_step, 0))

    out = jax.ShapeDtypeStruct((rows, parts * each + 1, all_tiles * GROUPS), jnp.int32)
    return launch(body, out, {"tile": all_tiles, "row": rows}, by_lane=True)(*given)


def step_of(largest: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """The power of two that is 1 where numbers of so many bits reach to `largest`, and its inverse;
    NaN and 0 where that is not finite.
    """
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23 & 0xFF
    place = jnp.maximum(exponent, bits) - (bits - 2)
    step = jax.lax.bitcast_convert_type(place << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 - place) << 23, jnp.float32)
    return jnp.where(exponent == 255, jnp.nan, step), jnp.where(exponent == 255, 0.0, inverse)


def rounded(x: jax.Array, bits: int) -> jax.Array:
    """To whole numbers of so many bits; NaN, which is what an infinity times 0 is, to 0."""
    most = np.float32(2 ** (bits - 1) - 1)
    moved = x + jnp.where(x < 0, np.float32(-0.5), np.float32(0.5))
    bounded = jnp.minimum(jnp.maximum(moved, -most), most)
    return jnp.where(x == x, bounded, 0.0).astype(jnp.int32)
