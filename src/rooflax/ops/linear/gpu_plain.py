"""The GPU's kernel of few rows of plain weights: reads each once, 16 bytes a thread.

A warpgroup has a tile of inputs and outputs, one load of each thread, and asks for several before
it uses the first. The warpgroups of a program share the inputs of its outputs, and the first adds
the others' sums in one order, with bias and residual. A norm or a gate happens where a row's
numbers meet the weights, by each thread for the inputs that it has; the sum of squares is shared.
Products and sums are float32.

Outputs lie beside each other, as `Dense` has them. A table, whose inputs do, is XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.linear.gpu_rows import (
    Rows,
    bias_of,
    finish,
    meet,
    most_warpgroups,
    warpgroups_of,
)
from rooflax.ops.linear.gpu_values import GROUPS, HALF, Share, ValueSource, fuses, gated, operands
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm, Prologue, applied
from rooflax.ops.weights import StoredOperand

LOAD_BYTES = 16
"""Bytes of a thread's load."""
THREADS = 128
"""Threads of a warpgroup."""
WIDTHS = (64, 32)
"""Outputs of a program: a whole line of memory in bfloat16, or half of one."""
LOADS = 8
"""Loads of a thread before it uses the first, at most."""
ENOUGH_PANELS = 264
"""Two for each of an H200's multiprocessors: below it they are of the smaller width."""


def unsupported(w: StoredOperand) -> str | None:
    """Reason why the kernel cannot read a weight, or a stack of them."""
    if w.code != "matrix":
        return "linear's GPU kernel reads no table, whose inputs lie beside each other: XLA has it"
    if w.dtype.itemsize not in (2, 4):
        return f"linear's GPU kernel reads no {w.dtype}"
    deepest, narrowest = _depth(w.dtype, min(WIDTHS)), min(WIDTHS)
    if w.inner % deepest or w.outer % narrowest:
        return (
            f"linear's GPU kernel takes plain weights' inputs by {deepest} and outputs by "
            f"{narrowest}, not {w.inner} and {w.outer}"
        )
    return None


def tiled_matmul(
    rows: Rows, w: StoredOperand, members: Int[Array, " tiles"], num_tiles: Int[Array, " one"]
) -> Float[Array, "tiles rows out"]:
    """`gpu_rows.tiled_matmul` of plain weights, without shares."""
    from rooflax.ops.mosaic import launch, plgpu

    assert rows.shares is None
    array = w.arrays[0].reshape(-1, w.inner, w.outer)
    (tokens, few, width), count, inner = rows.x.shape, len(members), w.inner
    columns, warpgroups = block_sizes.of(
        "linear.gpu plain",
        (rounded_up(count), rounded_up(few), inner, w.outer, w.dtype.name),
        _sizes(count, few, w),
        _candidates(few, w),
    )
    x, prologue = rows.x.reshape(tokens * few, width), rows.prologue
    is_normed = isinstance(prologue, Norm)
    if few > 1 or not fuses(prologue) or (is_normed and (inner % HALF or inner < GROUPS * HALF)):
        x, prologue = applied(prologue, x), None
    arrays: dict[str, Any] = {"w": array, "members": members, "num_tiles": num_tiles}
    arrays["x"] = x.reshape(tokens * few, -1, inner)
    scratch: dict[str, Any] = {}
    if isinstance(prologue, Norm):
        by_groups, weights = operands(x, HALF, prologue)
        arrays |= {"groups": by_groups, "weight": weights[0].reshape(-1)}
        scratch["squares"] = plgpu.SMEM((warpgroups * GROUPS,), jnp.float32)
        scratch["begun"] = plgpu.Barrier(num_arrivals=warpgroups)
    arrays |= {k: v for k, v in (("bias", rows.bias), ("residual", rows.residual)) if v is not None}
    shape = _depth(w.dtype, columns), columns
    scratch["sums"] = plgpu.SMEM((few, warpgroups * shape[0], columns), jnp.float32)
    scratch["met"] = plgpu.Barrier(num_arrivals=warpgroups)
    kernel = _Kernel(rows, prologue, shape, inner, warpgroups, few)

    def matmul_plain(*refs: Any, **memory: Any) -> None:
        kernel(dict(zip(arrays, refs, strict=False)) | memory, refs[-1])

    out = jax.ShapeDtypeStruct((count, few, w.outer), rows.result)
    grid = {"panel": w.outer // columns, "tile": count}
    threads = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    run = launch(
        matmul_plain, out, grid, by_lane=True, barriers=False, scratch_types=scratch, **threads
    )
    return run(*arrays.values())


@dataclass(frozen=True)
class _Kernel:
    """A program, by the names of its references.

    Attributes:
        prologue: what is left of it for the kernel.
        shape: inputs and outputs of a tile.
        few: rows of a tile of rows.
    """

    rows: Rows
    prologue: Prologue | None
    shape: tuple[int, int]
    inner: int
    warpgroups: int
    few: int

    def __call__(self, refs: dict[str, Any], out: Any) -> None:
        from rooflax.ops.mosaic import pl

        tile = jax.lax.axis_index("tile")
        pl.when(tile < refs["num_tiles"][0])(lambda: self.multiply(refs, out, tile))

    def multiply(self, refs: dict[str, Any], out: Any, tile: Any) -> None:
        """All inputs of a panel of outputs."""
        from rooflax.ops.mosaic import filled, load, pl, spread, store, values_layout

        warpgroup = jax.lax.axis_index("warpgroup") if self.warpgroups > 1 else jnp.int32(0)
        member, first = refs["members"][tile], tile // self.rows.share * self.few
        (depth, width), layout = self.shape, values_layout(self.shape)
        columns = pl.ds(jax.lax.axis_index("panel") * width, width)
        together = _together(self.inner // depth)
        steps = self.inner // (depth * together)
        scale = self.scale(refs, first, warpgroup) if isinstance(self.prologue, Norm) else None

        def step(index: Any, sums: list[jax.Array]) -> list[jax.Array]:
            # places in a block are constants, which an address takes for nothing
            block = pl.ds(index * (together * depth), together * depth)
            tiles = [pl.ds(at * depth, depth) for at in range(together)]
            weights_ref = refs["w"].at[member, block, columns]
            loaded = [load(weights_ref.at[tile], layout) for tile in tiles]
            for inputs, weights in zip(tiles, loaded, strict=True):
                numbers = weights.astype(jnp.float32)
                for row in range(self.few):
                    x = self.prepared(refs, first + row, (block, inputs), scale, layout.reduce(1))
                    sums[row] += numbers * spread(x, self.shape, 0, layout)
            return sums

        each = -(-steps // self.warpgroups)
        begin = warpgroup * each
        zeros = [filled(self.shape, 0.0, layout) for _ in range(self.few)]
        sums = jax.lax.fori_loop(begin, jnp.minimum(begin + each, steps), step, zeros)
        for row, total in enumerate(sums):
            store(refs["sums"].at[row, pl.ds(warpgroup * depth, depth)], total)
        meet(refs["met"])

        @pl.when(warpgroup == 0)
        def _() -> None:
            added = 4 * THREADS // width, width  # four numbers a thread: Mosaic adds no more
            vector = values_layout(added).reduce(0)
            for row in range(self.few):
                parts = [
                    load(refs["sums"].at[row, pl.ds(at, added[0])], values_layout(added))
                    for at in range(0, self.warpgroups * depth, added[0])
                ]
                total = sum(parts[1:], parts[0]).sum(axis=0)
                if "bias" in refs:
                    total = total + bias_of(refs, member, columns, vector)
                finish(refs, out, (tile, row, columns), total.astype(self.rows.result), vector)

    def scale(self, refs: dict[str, Any], row: Any, warpgroup: Any) -> Any:
        """Scale of a row's norm."""
        from rooflax.ops.mosaic import pl, store

        source = ValueSource(refs["groups"], None, self.prologue, refs["x"].dtype, self.inner)
        groups = pl.ds(warpgroup * GROUPS, GROUPS)
        share = Share(self.inner // HALF, self.warpgroups, warpgroup)
        store(refs["squares"].at[groups], source.squares_of(row, share))
        meet(refs["begun"])
        return source.scale_of(refs["squares"], self.warpgroups)

    def prepared(
        self, refs: dict[str, Any], row: Any, inputs: Any, scale: Any, layout: Any
    ) -> jax.Array:
        """Some of a row's numbers, behind the prologue.

        Args:
            inputs: their block, and their place in it.
        """
        from rooflax.ops.mosaic import load

        block, place = inputs

        def loaded(ref: Any) -> jax.Array:
            return load(ref.at[place], layout).astype(jnp.float32)

        x = loaded(refs["x"].at[row, 0, block])
        if self.prologue is None:
            return x
        if isinstance(self.prologue, Activation | ClampedSwiglu):
            x = gated(self.prologue, x, loaded(refs["x"].at[row, 1, block]))
        else:
            x = x * scale * loaded(refs["weight"].at[block])
        return x.astype(refs["x"].dtype).astype(jnp.float32)


def _depth(dtype: Any, width: int) -> int:
    """Inputs of a tile."""
    return THREADS * LOAD_BYTES // (dtype.itemsize * width)


def _together(tiles: int) -> int:
    return max(n for n in powers_of_two(LOADS) if tiles % n == 0)


def _sizes(count: int, few: int, w: StoredOperand) -> tuple[int, int]:
    """Outputs of a program, and its warpgroups."""
    wide, narrow = WIDTHS
    is_wide = w.outer % wide == 0 and count * (w.outer // wide) >= ENOUGH_PANELS
    width = wide if is_wide else narrow
    return width, warpgroups_of(count * (w.outer // width), _steps(w, width), few)


def _steps(w: StoredOperand, width: int) -> int:
    tiles = w.inner // _depth(w.dtype, width)
    return tiles // _together(tiles)


def _candidates(few: int, w: StoredOperand) -> list[tuple[int, int]]:
    candidates = []
    for width in WIDTHS:
        if w.outer % width == 0:
            most = powers_of_two(most_warpgroups(_steps(w, width), few))
            candidates += [(width, warpgroups) for warpgroups in most]
    return candidates
