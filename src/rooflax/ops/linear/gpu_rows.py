"""The GPU's kernel of few rows: reads packed weights where they lie, once, at their width.

A program has a panel of 16 outputs. Its warpgroups each have a range of the panel's rows of words,
TILE of them at a time: a thread has four neighbouring words of one row. What it does with them is
`gpu_codes`; it sums in float32. The first warpgroup adds the others' sums, in shared memory and in
one order, and what comes behind a matmul: scales, bias, residual.

One row of activations is packed here (gpu_values.py), in every program again: to launch a kernel
takes longer. A program that is one warpgroup may take several panels, one after the other. With one
panel it may ask for the words of its first tile before it packs, and for each next tile before it
multiplies one, which takes registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.format_names import PANEL
from rooflax.ops.linear.gpu_codes import CODES
from rooflax.ops.linear.gpu_values import (
    GROUPS,
    Packing,
    Share,
    ValueSource,
    begin_of,
    fuses,
    operands,
)
from rooflax.ops.linear.prologue import Norm, Prologue, applied
from rooflax.ops.weights import Quantized
from rooflax.ops.weights.matrix_packing import e8m0

ROWS_AT_ONCE = 8
"""Rows that share one unpacking by rule; more are other programs'."""
ENOUGH_WARPGROUPS = 512
"""Four for each of an H200's 132 multiprocessors: below it several share a panel."""
MOST_WARPGROUPS = 4
"""Warpgroups of a program; half of it where several rows take many registers."""
ENOUGH_PROGRAMS = 528
"""Four for each multiprocessor: above it a program takes several panels."""
MOST_PANELS = 8
"""Panels of a program."""
MOST_PACKED = 8192
"""Inputs of a row up to which every program packs it again."""
TILE = 32
"""Rows of words a warpgroup takes at a time."""


@dataclass(frozen=True)
class Rows:
    """Rows of activations, and what they go through.

    Attributes:
        x: not rounded yet; tile t has the rows of x[t // share].
        dtype: of the model's activations, which says how exact x has to be.
        bias: tile t has that of its member modulo their number.
        residual: of each tile, what is added last.
        result: the type of what comes out.
        shares: of tiles of one row: a program has the tiles of one row of these, a warpgroup each,
            and gives their sum, of each tile times its share; the residual is one of the sum.
    """

    x: Float[Array, "tokens rows width"]
    dtype: Any
    prologue: Prologue | None = None
    share: int = 1
    bias: Float[Array, "biases out"] | None = None
    residual: Float[Array, "results rows out"] | None = None
    result: Any = jnp.float32
    shares: Float[Array, "sums together"] | None = None

    @property
    def together(self) -> int:
        """Tiles of a program."""
        return 1 if self.shares is None else self.shares.shape[1]


def tiled_matmul(
    rows: Rows, w: Quantized, members: Int[Array, " tiles"], num_tiles: Int[Array, " one"]
) -> Float[Array, "results rows out"]:
    """prologue(x)[t] @ w[members[t]] + bias + residual for the first `num_tiles` tiles; the others
    are undefined. With shares, the sums over so many tiles.

    Args:
        w: one matrix, or a stack of which only the members asked for are read.
    """
    from rooflax.ops.mosaic import launch, plgpu

    code, (tokens, few, width) = CODES[w.code], rows.x.shape
    words, count = _words(w, code.words), len(members) // rows.together
    _, panels, word_rows, _, _ = words.shape
    steps = -(-word_rows // TILE)
    packing = code.packing(w, rows.dtype)
    if few > 1 or word_rows < GROUPS or word_rows * code.num_inputs > MOST_PACKED:
        packing = None
    chosen = warpgroups_of(count * panels, steps, few)
    packs_alone = packing is not None and _panels_each(count * panels, chosen) == 1
    warpgroups, at_once, ahead = block_sizes.of(
        "linear.gpu",
        (rounded_up(count), rounded_up(few), word_rows * code.num_inputs, panels * PANEL, w.code),
        (chosen, ROWS_AT_ONCE, 0),
        [*_candidates(steps, few), *([(chosen, ROWS_AT_ONCE, 1)] if packs_alone else [])],
    )
    if rows.shares is not None:
        warpgroups = rows.together
    turns = -(-few // at_once)
    arrays: dict[str, Any] = {
        "words": words.reshape(-1, code.words, PANEL),
        "scales": w.scales.reshape(-1, PANEL),
        "members": members,
        "num_tiles": num_tiles,
    }
    scratch: dict[str, Any] = {}
    prologue = rows.prologue
    if packing is not None:
        x = rows.x.reshape(tokens * few, width)
        if not fuses(prologue):
            x, prologue = applied(prologue, x), None
        arrays["x"], weights = operands(x, code.num_inputs, prologue)
        arrays |= zip(["weight"], weights, strict=False)
        padded = -(-word_rows // GROUPS) * GROUPS
        copies = rows.together
        scratch["packed"] = plgpu.SMEM((copies, packing.count, padded), jnp.int32)
        scratch["squares"] = plgpu.SMEM((warpgroups * GROUPS,), jnp.float32)
        scratch["begun"] = plgpu.Barrier(num_arrivals=warpgroups)
        scratch["ready"] = plgpu.Barrier(num_arrivals=warpgroups)
    else:
        values = code.values(rows.x.reshape(tokens * few, width), w, rows.dtype, prologue)
        arrays["values"] = values.reshape(tokens, few, *values.shape[1:])
    behind = ((0, 0), (0, panels * PANEL - w.outer))
    if rows.bias is not None:
        arrays["bias"] = jnp.pad(rows.bias, behind)
    if rows.shares is not None:
        arrays["shares"] = rows.shares
    if rows.residual is not None:
        arrays["residual"] = jnp.pad(rows.residual, ((0, 0), *behind))
    if warpgroups > 1:
        held = min(at_once, few)
        scratch["sums"] = plgpu.SMEM((warpgroups, held, TILE, PANEL), jnp.float32)
        scratch["met"] = plgpu.Barrier(num_arrivals=warpgroups)
    kernel = _Kernel(
        w.code, panels, word_rows, warpgroups, few, -(-few // turns), rows,
        prologue, packing, _panels_each(count * panels * turns, warpgroups), bool(ahead),
    )  # type: ignore[arg-type]  # fmt: skip

    def matmul_rows(*refs: Any, **memory: Any) -> None:
        kernel(dict(zip(arrays, refs, strict=False)) | memory, refs[-1])

    out = jax.ShapeDtypeStruct((count, few, panels * PANEL), rows.result)
    grid = {"panel": -(-panels // kernel.panels_each), "turn": turns, "tile": count}
    lanes = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    lanes |= {"barriers": False, "scratch_types": scratch}
    run = launch(matmul_rows, out, grid, by_lane=True, **lanes)
    return run(*arrays.values())[..., : w.outer]


def _words(w: Quantized, each: int) -> Int[Array, "members panels rows words 16"]:
    """The packed bytes, four to an int32, which is no work on a GPU."""
    values = w.values
    if not w.grouped:
        values = values.reshape(*values.shape[:-3], values.shape[-3] // each, each, PANEL, 4)
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    return words.reshape(-1, *words.shape[-4:])


@dataclass(frozen=True)
class _Kernel:
    """A program, by the names of its references.

    Attributes:
        word_rows: of a panel.
        few: rows of a tile.
        shared: rows of a turn; the last turn repeats what it lacks.
        prologue: what is left of it for the kernel.
        packing: None where the values are packed already.
        ahead: words are asked for before what comes before them is done.
    """

    name: str
    panels: int
    word_rows: int
    warpgroups: int
    few: int
    shared: int
    rows: Rows
    prologue: Prologue | None
    packing: Packing | None
    panels_each: int
    ahead: bool = False

    def __call__(self, refs: dict[str, Any], out: Any) -> None:
        from rooflax.ops.mosaic import pl

        tile, turn = jax.lax.axis_index("tile"), jax.lax.axis_index("turn")
        warpgroup = jax.lax.axis_index("warpgroup") if self.warpgroups > 1 else jnp.int32(0)
        rows = [jnp.minimum(turn * self.shared + at, self.few - 1) for at in range(self.shared)]

        @pl.when(tile < refs["num_tiles"][0])
        def _() -> None:
            first = jax.lax.axis_index("panel") * self.panels_each
            tile_here = tile if self.rows.shares is None else tile * self.warpgroups + warpgroup
            words = None
            if self.ahead:
                begin, _ = self.turns(warpgroup)
                words = self.words(refs, self.start(refs, tile_here, first, begin)[0])
            if self.packing is not None:
                self.pack(refs, tile_here, warpgroup, self.packing)
            if self.panels_each == 1:
                self.panel(refs, out, tile, first, rows, warpgroup, words)
                return

            def one(index: Any, carry: Any) -> Any:
                self.panel(refs, out, tile, index, rows, warpgroup)
                return carry

            jax.lax.fori_loop(first, jnp.minimum(first + self.panels_each, self.panels), one, 0)

    def pack(self, refs: dict[str, Any], tile: Any, warpgroup: Any, packing: Packing) -> None:
        """The row's values to shared memory: each warpgroup takes some tiles of groups, or all of
        a row of its own. The last tile begins earlier where it is not full, and zeros are behind
        it."""
        from rooflax.ops.mosaic import pl, plgpu, store, words_layout

        row, packed, helpers = tile // self.rows.share, refs["packed"].at[0], self.warpgroups
        if self.rows.shares is not None:
            packed, helpers = refs["packed"].at[warpgroup], 1
        groups, number = self.word_rows, warpgroup if helpers > 1 else jnp.int32(0)
        inner = groups * packing.num_inputs
        source = ValueSource(refs["x"], refs.get("weight"), self.prologue, refs["x"].dtype, inner)
        share, scale = Share(groups, helpers, number), None
        if groups % GROUPS:

            @pl.when(number == 0)
            def _() -> None:
                last = pl.ds(groups // GROUPS * GROUPS, GROUPS)
                zeros = jnp.zeros((GROUPS,), jnp.int32)
                none = plgpu.layout_cast(zeros, words_layout().reduce(1))
                for index in range(packing.count):
                    store(packed.at[index, last], none)

        if isinstance(self.prologue, Norm):
            lanes_here = pl.ds(warpgroup * GROUPS, GROUPS)
            store(refs["squares"].at[lanes_here], source.squares_of(row, share))
        meet(refs["begun"])
        if isinstance(self.prologue, Norm):
            scale = source.scale_of(refs["squares"], helpers)

        def tile_of_groups(index: Any, carry: Any) -> Any:
            start, _ = share.start(index)
            packing.store(packed, start, packing.packed(source.prepared(row, start, scale)))
            return carry

        jax.lax.fori_loop(0, share.count, tile_of_groups, 0)
        meet(refs["ready"])

    def turns(self, warpgroup: Any) -> tuple[Any, Any]:
        """The first of a warpgroup's tiles of words, and the last."""
        steps = -(-self.word_rows // TILE)
        if self.rows.shares is not None:
            return jnp.int32(0), jnp.int32(steps)
        each = -(-steps // self.warpgroups)
        return warpgroup * each, jnp.minimum(warpgroup * each + each, steps)

    def start(self, refs: dict[str, Any], tile: Any, panel: Any, index: Any) -> tuple[Any, Any]:
        """First row of a panel's tile of words, and how many rows earlier that is than it should,
        because nothing follows the last panel."""
        wanted = (refs["members"][tile] * self.panels + panel) * self.word_rows + index * TILE
        start = jnp.minimum(wanted, refs["words"].shape[0] - TILE)
        return start, wanted - start

    def words(self, refs: dict[str, Any], start: Any) -> list[jax.Array]:
        """A tile of words."""
        from rooflax.ops.mosaic import load, pl, words_layout

        words_ref, rows = refs["words"], pl.ds(start, TILE)
        count = CODES[self.name].words
        return [load(words_ref.at[rows, word], words_layout()) for word in range(count)]

    def panel(
        self, refs: dict[str, Any], out: Any, tile: Any, panel: Any, rows: list[Any],
        warpgroup: Any, ahead: list[jax.Array] | None = None,
    ) -> None:  # fmt: skip
        """All inputs of one panel.

        Args:
            ahead: words of the first tile.
        """
        from rooflax.ops.mosaic import filled, load, pl, plgpu, spread, store, words_layout

        code, layout, shape = CODES[self.name], words_layout(), (TILE, PANEL)
        scales_ref, zero = refs["scales"], refs["num_tiles"][0] >> 31
        number = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
        tile_here = tile if self.rows.shares is None else tile * self.warpgroups + warpgroup
        member = refs["members"][tile_here]

        packed: Any = None if self.packing else refs["values"].at[tile_here // self.rows.share]
        copy = jnp.int32(0) if self.rows.shares is None else warpgroup

        def places(index: Any, lacking: Any) -> Any:
            """Places of the values in a tile of words that begins `lacking` rows earlier, because
            nothing follows the last panel."""
            if self.packing:
                return pl.ds(index * TILE - lacking, TILE)
            first = begin_of(self.word_rows)
            return pl.ds(jnp.where(lacking > 0, GROUPS - lacking, first + index * TILE), TILE)

        def value(at: int, row: Any, place: Any, lacking: Any) -> jax.Array:
            """One of the values of a tile's inputs."""
            if self.packing is None:
                return load(packed.at[row, at, place], layout.reduce(1))
            word = load(refs["packed"].at[copy, at, place], layout.reduce(1))
            if self.word_rows % TILE and at == self.packing.count - 1:
                word = jnp.where(number >= lacking, word, 0)  # those before were taken
            return word

        def step(index: jax.Array, state: Any) -> Any:
            sums, *held = state
            start, lacking = self.start(refs, tile_here, panel, index)
            following = start
            if held:
                following, _ = self.start(refs, tile_here, panel, jnp.minimum(index + 1, end - 1))
            loaded = self.words(refs, following)
            if held:
                loaded, held = held[0], [loaded]
            place = places(index, lacking)

            def of(row: Any, at: int) -> jax.Array:
                return spread(value(at, row, place, lacking), shape, 0, layout)

            count = self.packing.count if self.packing else refs["values"].shape[2]
            numbers = code.numbers(loaded, zero)
            parts = [code.dot(numbers, partial(of, row), count) for row in rows]
            if self.name in SCALE:
                scale = SCALE[self.name](load(scales_ref.at[pl.ds(start, TILE)], layout))
                # of other panels, or of no weight at all, where there are no inputs
                scale = jnp.where(of(rows[0], count - 1) != 0, scale, 0.0)
                parts = [part * scale for part in parts]
            return [total + part for total, part in zip(sums, parts, strict=True)], *held

        begin, end = self.turns(warpgroup)
        zeros = [filled(shape, 0.0, layout) for _ in rows]
        begun = (zeros, *([ahead] if ahead else []))
        sums = jax.lax.fori_loop(begin, end, step, begun)[0]
        columns, vector = pl.ds(panel * PANEL, PANEL), layout.reduce(0)

        def scale_of(member: Any) -> Any:
            return load(scales_ref.at[member * self.panels + panel], vector)

        def added(index: int) -> Any:
            """Adds the bias to the matmul's result."""
            total = sums[index]
            if self.warpgroups > 1:
                every = [
                    load(refs["sums"].at[other, index], layout) for other in range(self.warpgroups)
                ]
                total = sum(every[1:], every[0])
            total = total.sum(axis=0) * np.float32(code.scale)
            total = total if self.name in SCALE else total * scale_of(member)
            return total + bias_of(refs, member, columns, vector) if "bias" in refs else total

        def shared() -> Any:
            """The sum of the warpgroups' tiles, each times its share."""
            totals, biases = [], []
            for other in range(self.warpgroups):
                share = refs["shares"][tile, other]
                one = load(refs["sums"].at[other, 0], layout) * (share * np.float32(code.scale))
                of_other = refs["members"][tile * self.warpgroups + other]
                if self.name not in SCALE:
                    one = one * spread(scale_of(of_other), shape, 1, layout)
                totals.append(one)
                if "bias" in refs:
                    biases.append(bias_of(refs, of_other, columns, vector) * share)
            return sum(biases, sum(totals[1:], totals[0]).sum(axis=0))

        if self.warpgroups > 1:
            for index in range(len(rows)):
                store(refs["sums"].at[warpgroup, index], sums[index])
            meet(refs["met"])

        @pl.when(warpgroup == 0)
        def _() -> None:
            for index, row in enumerate(rows):
                total = added(index) if self.rows.shares is None else shared()
                finish(refs, out, (tile, row, columns), total.astype(self.rows.result), vector)


def meet(barrier: Any) -> None:
    """All threads have written what others read behind it."""
    from rooflax.ops.mosaic import plgpu

    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def bias_of(refs: dict[str, Any], member: Any, columns: Any, layout: Any) -> Any:
    """Bias of some outputs of a member, in float32."""
    from rooflax.ops.mosaic import load

    bias = refs["bias"]
    return load(bias.at[member % bias.shape[0], columns], layout).astype(jnp.float32)


def finish(refs: dict[str, Any], out: Any, place: Any, total: Any, layout: Any) -> None:
    """Adds the residual to rounded sums, and stores them.

    Args:
        place: tile, row and outputs.
    """
    from rooflax.ops.mosaic import load, store

    if "residual" in refs:
        onto = load(refs["residual"].at[place], layout).astype(jnp.float32)
        total = (total.astype(jnp.float32) + onto).astype(total.dtype)
    store(out.at[place], total)


def warpgroups_of(panels: int, steps: int, few: int) -> int:
    """So many share a panel that the whole card has something to read."""
    most = most_warpgroups(steps, few)
    return max(n for n in powers_of_two(most) if n == 1 or panels * n < 2 * ENOUGH_WARPGROUPS)


def most_warpgroups(steps: int, few: int) -> int:
    return min(steps, MOST_WARPGROUPS if few <= 2 else MOST_WARPGROUPS // 2)


def _panels_each(programs: int, warpgroups: int) -> int:
    """Panels that a program takes, so that what it packs is for more than one."""
    most = MOST_PANELS if warpgroups == 1 else 1
    return max(n for n in powers_of_two(most) if n == 1 or programs >= n * ENOUGH_PROGRAMS)


def _candidates(steps: int, few: int) -> list[tuple[int, int, int]]:
    """Warpgroups of a panel, and rows at once: as the rule says, or half of that."""
    half = ROWS_AT_ONCE // 2
    at_once = [ROWS_AT_ONCE, half] if few > half else [ROWS_AT_ONCE]
    most = powers_of_two(most_warpgroups(steps, few))
    return [(warpgroups, rows, 0) for warpgroups in most for rows in at_once]


SCALE = {
    "int8-g32": lambda scales: scales.astype(jnp.float32),
    "int4": lambda scales: scales.astype(jnp.float32),
    "mxfp4": e8m0,
}
