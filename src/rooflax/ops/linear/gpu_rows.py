"""The GPU's kernel of few rows: reads packed weights where they lie, once, at their width.

A warpgroup has a panel of 16 outputs and a range of its rows of words, TILE of them at a time: a
thread has four neighbouring words of one row. What it does with them is `gpu_codes`; it sums in
float32, and `split` ranges of one panel are summed behind it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.formats import PANEL
from rooflax.ops.linear.gpu_codes import CODES
from rooflax.ops.linear.prologue import Prologue
from rooflax.ops.weights import Quantized
from rooflax.ops.weights.matrix_packing import e8m0

ROWS_AT_ONCE = 8
"""Rows that share one unpacking by rule; more are taken in turn, from the cache."""
ENOUGH_PROGRAMS = 1056
"""Eight warpgroups for each of an H200's 132 multiprocessors: below it a panel's rows are split."""
TILE = 32
"""Rows of words a warpgroup takes at a time."""


def tiled_matmul(
    x: Float[Array, "tiles rows width"],
    w: Quantized,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
    dtype: Any,
    prologue: Prologue | None = None,
) -> Float[Array, "tiles rows out"]:
    """prologue(x)[t] @ w[members[t]] for the first `num_tiles` tiles; the others are undefined.

    Args:
        x: not rounded yet.
        w: one matrix, or a stack of which only the members asked for are read.
        dtype: of the model's activations, which says how exact x has to be.
    """
    code, (count, rows, width) = CODES[w.code], x.shape
    words = _words(w, code.words)
    values = code.values(x.reshape(count * rows, width), w, dtype, prologue)
    values = values.reshape(count, rows, *values.shape[1:])
    scales = w.scales.reshape(-1, PANEL) if w.grouped else jnp.zeros((1, PANEL), jnp.float32)
    sums = _sums(words, values, scales, members, num_tiles, w.code)
    if not w.grouped:
        of_member = w.scales.reshape(-1, w.scales.shape[-1])[members] if w.stack else w.scales[None]
        sums = sums * of_member[:, None, :]
    return sums[..., : w.outer]


def _words(w: Quantized, each: int) -> Int[Array, "members panels rows words 16"]:
    """The packed bytes, four to an int32, which is no work on a GPU."""
    values = w.values
    if not w.grouped:
        values = values.reshape(*values.shape[:-3], values.shape[-3] // each, each, PANEL, 4)
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    return words.reshape(-1, *words.shape[-4:])


def _sums(
    words: Int[Array, "members panels rows words 16"],
    x: Int[Array, "tiles few count padded"],
    scales: Array,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
    name: str,
) -> Float[Array, "tiles few outputs"]:
    """The kernel and the sum over its splits."""
    from rooflax.ops.mosaic import filled, launch, load, pl, spread, store, words_layout

    code, layout, shape = CODES[name], words_layout(), (TILE, PANEL)
    _, panels, word_rows, _, _ = words.shape
    count, few, num_values, _ = x.shape
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
                again = (steps + 1) * TILE - (wanted - start)  # where there is a last tile twice
                inputs = pl.ds(jnp.where(start < wanted, again, index * TILE), TILE)
                loaded = [
                    load(words_ref.at[pl.ds(start, TILE), word], layout)
                    for word in range(code.words)
                ]

                def value(at: int, row: Any) -> jax.Array:
                    return spread(
                        load(x_ref.at[tile, row, at, inputs], layout.reduce(1)), shape, 0, layout
                    )

                numbers = code.numbers(loaded)
                parts = [code.dot(numbers, partial(value, row=row), num_values) for row in rows]
                if name in SCALE:
                    scale = SCALE[name](load(scales_ref.at[pl.ds(start, TILE)], layout))
                    # of other panels, or of no weight at all, where there are no inputs
                    scale = jnp.where(value(num_values - 1, rows[0]) != 0, scale, 0.0)
                    parts = [part * scale for part in parts]
                return [total + part for total, part in zip(sums, parts, strict=True)]

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
    run = launch(body, out, grid, by_lane=True)
    partial_sums = run(flat, x, scales, members, num_tiles)
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


SCALE = {
    "int8-g32": lambda scales: scales.astype(jnp.float32),
    "int4": lambda scales: scales.astype(jnp.float32),
    "mxfp4": e8m0,
}
