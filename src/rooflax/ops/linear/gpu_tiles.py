"""The GPU's kernel for many rows: packed weights become operands of the tensor cores in registers.

A program multiplies 128 outputs, 64 for each of two warpgroups, with a tile of rows. The result is
computed transposed: the tensor cores take their left operand from registers, here the weights, and
the right one from shared memory, here the rows. Words, scales and rows come to shared memory by
TMA, several groups of 32 inputs at a time, some stages ahead. A warpgroup upcasts the words of a
group to bfloat16 just before it multiplies them, so that weights are never written upcast.

Nothing is rounded: every code is a bfloat16, and so is an MXFP4 number times its power of two. The
float16 scales of int4 and int8-g32 are not, so that each group is summed by itself and scaled in
float32 (the second warpgroup multiplies meanwhile). Scales of outputs multiply the whole sum.

Where a tile of rows and outputs is too little for the whole card, programs share the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.format_names import GROUP, PANEL
from rooflax.ops.weights import Quantized
from rooflax.ops.weights.matrix_packing import e8m0

PANELS = 4
"""Panels of a warpgroup: 64 outputs."""
WARPGROUPS = 2
"""Warpgroups of a program."""
TOGETHER = 4
"""Groups of inputs of a stage."""
STAGES = 4
"""Stages of rows, words and scales on their way to shared memory, by rule."""
ENOUGH_PROGRAMS = 132
"""One for each of an H200's multiprocessors, of tiles of 32 rows two: below it programs share the
inputs."""
LEAST_STEPS = 4
"""Stages of a program that shares them."""

ORDER = np.array(
    [
        16 * half + 4 * thread + byte
        for half in range(2)
        for block in range(2)
        for thread in range(4)
        for byte in (block, block + 2)
    ]
)
"""Inputs of a group in the order of an operand's columns: a thread has a word, which has four
inputs of each half of the group or, with a byte each, of one."""


@dataclass(frozen=True)
class Code:
    """Code of a weight format: how words become operands.

    Attributes:
        words: of an output and a group that a thread has.
        unpack: so many [4, 64] words to an operand [64, 32].
        rows: of a tile at most: sums of single groups take as many registers as the whole ones.
        scales: what they multiply: "sums" of groups, the "operand", or the "whole" sum.
        factor: of the whole sum, besides.
    """

    words: int
    unpack: Callable[[list[jax.Array]], jax.Array]
    rows: int = 256
    scales: str = "whole"
    factor: float = 1.0


def _int4(words: list[jax.Array]) -> jax.Array:
    """q - 8: with q in the lowest bits of 128."""
    return _pairs(_nibbles(words, (0, 8, 4, 12)), 0x000F000F, 0x43004300) - jnp.bfloat16(136)


def _int8(words: list[jax.Array]) -> jax.Array:
    """Seven bits in the lowest of 128, less 128, or 256 for those with a sign."""
    halves = [half for word in words for half in (word, word >> 8)]
    return _pairs(halves, 0x007F007F, 0x43004300) - _pairs(halves, 0x00800080, 0x43004300)


def _mxfp4(words: list[jax.Array]) -> jax.Array:
    """e2m1: its exponent and mantissa over an exponent that is a quarter too small."""
    turned = _nibbles(words, (-6, 2, -2, 6))
    signs = _nibbles(words, (-12, -4, -8, 0))
    return _normal(_pairs(turned, 0x01C001C0, 0x3E003E00), 0.25) * _pairs(
        signs, -0x7FFF8000, 0x40804080
    )


def _fp8(words: list[jax.Array]) -> jax.Array:
    """e4m3 / 256, which is the same of bfloat16's exponents."""
    tops = [top for word in words for top in (word << 8, word)]
    signs = _pairs(tops, -0x7FFF8000, 0x3F803F80)
    return _normal(_pairs([top >> 4 for top in tops], 0x07F007F0, 0x38003800), 2.0**-14) * signs


def _normal(x: jax.Array, smallest: float) -> jax.Array:
    """Numbers whose exponent of 0 has no leading 1, of those that have it with any."""
    return jnp.minimum(x + x - jnp.bfloat16(smallest), x)


def _nibbles(words: list[jax.Array], down: tuple[int, ...]) -> list[jax.Array]:
    """Words moved down, or up: lower nibbles of bytes 0 and 2, of 1 and 3; the higher ones."""
    (word,) = words
    return [word >> by if by > 0 else word << -by if by else word for by in down]


def _pairs(words: list[jax.Array], mask: int, ones: int) -> jax.Array:
    """An operand of these bits and ones."""
    from rooflax.ops.mosaic_fragments import operand

    return operand([word & mask | ones for word in words])


CODES = {
    "int8": Code(2, _int8),
    "int8-g32": Code(2, _int8, rows=128, scales="sums"),
    "int4": Code(1, _int4, rows=128, scales="sums"),
    "mxfp4": Code(1, _mxfp4, scales="operand"),
    "fp8": Code(2, _fp8, factor=256.0),
}


def unsupported(w: Quantized) -> str | None:
    """Reason why the kernel cannot read a weight, or a stack of them."""
    if w.inner % GROUP or w.inner < 2 * GROUP:  # of one, TMA would not align MXFP4's scales
        return f"linear's tensor cores take inputs by {GROUP} from {2 * GROUP}, not {w.inner}"
    if w.outer <= (PANELS - 1) * PANEL:
        return f"linear's tensor cores take more than {(PANELS - 1) * PANEL} outputs, not {w.outer}"
    return None


def matmul(
    x: Float[Array, "rows in"],
    w: Quantized,
    member: Int[Array, " one"],
    bias: Float[Array, " out"] | None,
    dtype: Any,
) -> Float[Array, "rows out"]:
    """x @ w[member] + bias, of bfloat16 rows, summed in float32.

    Args:
        w: one matrix, or a stack of which only the member is read.
        dtype: of the result.
    """
    rows, code, groups = len(x), CODES[w.code], w.inner // GROUP
    tile, splits = block_sizes.of(
        "linear.gpu tiles",
        (rounded_up(rows), w.inner, w.outer, w.code),
        _sizes(code, rows, groups, _programs(w)[1]),
        _candidates(code, rows, groups),
    )
    tiles = -(-rows // tile)
    x = jnp.pad(x, ((0, tiles * tile - rows), (0, 0))).reshape(tiles, tile, -1)
    added = bias if splits == 1 else None
    y = _multiplied(x, w, member, None, added, dtype if splits == 1 else jnp.float32, splits)
    y = y.reshape(splits, tiles * tile, -1)[:, :rows, : w.outer]
    if splits == 1:
        return y[0]
    y = y.sum(axis=0)
    return (y if bias is None else y + bias.astype(jnp.float32)[None]).astype(dtype)


def tile_matmuls(
    x: Float[Array, "tiles tile in"],
    w: Quantized,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
) -> Float[Array, "tiles tile out"]:
    """x[t] @ w[members[t]] in float32, for the first `num_tiles` tiles of at most 128 rows; the
    others are undefined."""
    return _multiplied(x, w, members, num_tiles, None, jnp.float32, 1)[0, ..., : w.outer]


def _programs(w: Quantized) -> tuple[int, int]:
    """Warpgroups of a program, and programs that have all outputs of a tile."""
    panels = -(-w.outer // PANEL)
    warpgroups = WARPGROUPS if panels >= WARPGROUPS * PANELS else 1
    return warpgroups, -(-panels // (warpgroups * PANELS))


def _multiplied(
    x: Float[Array, "tiles tile in"],
    w: Quantized,
    members: Int[Array, " members"],
    num_tiles: Int[Array, " one"] | None,
    bias: Float[Array, " out"] | None,
    dtype: Any,
    splits: int,
) -> Float[Array, "splits tiles tile padded"]:
    """Sums of the shares of the inputs, of outputs padded to whole panels.

    Args:
        members: of each tile, or of all.
        num_tiles: how many are wanted; None is all.
    """
    from rooflax.ops.mosaic import is_interpreted, launch, plgpu

    code, (tiles, tile, _) = CODES[w.code], x.shape
    groups, panels = w.inner // GROUP, -(-w.outer // PANEL)
    (warpgroups, programs), together = _programs(w), min(_together(tile), groups)
    num_panels, steps = warpgroups * PANELS, -(-groups // together)
    words = jax.lax.bitcast_convert_type(w.values, jnp.int32)
    arrays: dict[str, Any] = {
        "x": _ordered(x, steps, together),
        "words": words.reshape(-1, panels, groups, 64 * code.words),
        "scales": w.scales.reshape(-1, panels, *(groups,) * w.grouped, PANEL),
        "members": members,
    }
    if num_tiles is not None:
        arrays["num_tiles"] = num_tiles
    if bias is not None:
        arrays["bias"] = jnp.pad(bias, (0, panels * PANEL - w.outer)).reshape(panels, PANEL)
    swizzle = plgpu.TilingTransform((8, GROUP)), plgpu.SwizzleTransform(2 * GROUP)
    scratch: dict[str, Any] = {
        "x_here": plgpu.SMEM((STAGES, together, tile, GROUP), jnp.bfloat16, transforms=swizzle),
        "words_here": plgpu.SMEM((STAGES, num_panels, together, 64 * code.words), jnp.int32),
        "here": plgpu.Barrier(num_arrivals=2 + w.grouped, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
    }
    if w.grouped:
        scratch["scales_here"] = plgpu.SMEM((STAGES, num_panels, together, PANEL), w.scales.dtype)
    if is_interpreted():  # which takes operands from shared memory only
        scratch["operand"] = plgpu.SMEM((warpgroups, 64, GROUP), jnp.bfloat16)
    kernel = _Kernel(w.code, warpgroups, panels, groups, tile, steps, -(-steps // splits), together)

    def multiply_tiles(*refs: Any, **memory: Any) -> None:
        kernel(dict(zip(arrays, refs, strict=False)) | memory, refs[-1])

    out = jax.ShapeDtypeStruct((splits, tiles, tile, panels, PANEL), dtype)
    grid = {"split": splits, "panel": programs, "tile": tiles}
    threads = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    run = launch(multiply_tiles, out, grid, by_lane=True, scratch_types=scratch, **threads)
    return run(*arrays.values()).reshape(splits, tiles, tile, -1)


def _sizes(code: Code, rows: int, groups: int, programs: int) -> tuple[int, int]:
    """Rows of a tile, and programs that share its inputs.

    Args:
        programs: that have all outputs of a tile.
    """
    tile = min(code.rows, -(-rows // 8) * 8)
    if tile > 128 and -(-rows // tile) * programs < ENOUGH_PROGRAMS:
        tile = 128
    programs *= -(-rows // tile)
    enough = ENOUGH_PROGRAMS * (2 if tile <= 32 else 1)
    most = _most_splits(groups)
    return tile, max(n for n in powers_of_two(most) if n == 1 or programs * n <= enough)


def _candidates(code: Code, rows: int, groups: int) -> list[tuple[int, int]]:
    tiles = [n for n in (64, 128, 192, 256) if n <= code.rows and n < rows + 8]
    tiles = tiles or [-(-rows // 8) * 8]
    return [(tile, splits) for tile in tiles for splits in powers_of_two(_most_splits(groups))]


def _most_splits(groups: int) -> int:
    return max(1, -(-groups // TOGETHER) // LEAST_STEPS)


def _together(tile: int) -> int:
    """Groups of a stage: as many rows as shared memory holds."""
    return TOGETHER if tile <= 128 else TOGETHER // 2


def _ordered(
    x: Float[Array, "tiles tile in"], steps: int, together: int
) -> Float[Array, "tiles groups tile 32"]:
    """Rows as the right operand, groups of inputs one after the other. The last stage is a whole
    one, which begins earlier: zeros meet what was multiplied before."""
    tiles, tile, inner = x.shape
    groups = inner // GROUP
    x = x.astype(jnp.bfloat16).reshape(tiles, tile, groups, GROUP)[..., ORDER].swapaxes(1, 2)
    if not (again := steps * together - groups):
        return x
    begun = (steps - 1) * together
    nothing = jnp.zeros_like(x[:, :again])
    return jnp.concatenate([x[:, :begun], nothing, x[:, begun:]], axis=1)


@dataclass(frozen=True)
class _Kernel:
    """A program, by the names of its references.

    Attributes:
        steps: stages that all inputs take.
        own_steps: those of a program that shares them.
    """

    name: str
    warpgroups: int
    panels: int
    groups: int
    tile: int
    steps: int
    own_steps: int
    together: int

    @property
    def code(self) -> Code:
        return CODES[self.name]

    def __call__(self, refs: dict[str, Any], out: Any) -> None:
        from rooflax.ops.mosaic import pl

        tile = jax.lax.axis_index("tile")
        if "num_tiles" not in refs:
            self.multiply_tile(refs, out, tile)
            return
        pl.when(tile < refs["num_tiles"][0])(lambda: self.multiply_tile(refs, out, tile))

    def multiply_tile(self, refs: dict[str, Any], out: Any, tile: Any) -> None:
        from rooflax.ops.mosaic import accumulator, filled, pl, plgpu, store
        from rooflax.ops.mosaic_fragments import transposed

        warpgroup = jax.lax.axis_index("warpgroup") if self.warpgroups > 1 else jnp.int32(0)
        split, num_panels = jax.lax.axis_index("split"), self.warpgroups * PANELS
        # the last program's panels begin earlier where there are not so many
        panel = jnp.minimum(jax.lax.axis_index("panel") * num_panels, self.panels - num_panels)
        panels = pl.ds(panel + warpgroup * PANELS, PANELS)
        member = refs["members"][tile if refs["members"].shape[0] > 1 else 0]
        begin = split * self.own_steps
        end = jnp.minimum(begin + self.own_steps, self.steps)

        def ask_for(step: Any) -> None:
            stage = jax.lax.rem(step - begin, STAGES)
            group = jnp.minimum(step * self.together, self.groups - self.together)
            here = refs["here"].at[stage]
            rows = refs["x"].at[tile, pl.ds(step * self.together, self.together)]
            plgpu.copy_gmem_to_smem(rows, refs["x_here"].at[stage], here)
            for name in ("words", "scales"):
                if (to := f"{name}_here") in refs:
                    place = (member, pl.ds(panel, num_panels), pl.ds(group, self.together))
                    plgpu.copy_gmem_to_smem(refs[name].at[place], refs[to].at[stage], here)

        @pl.when(warpgroup == 0)
        def _() -> None:
            for ahead in range(min(STAGES, self.own_steps)):
                pl.when(begin + ahead < end)(lambda ahead=ahead: ask_for(begin + ahead))

        def turn(step: Any, multiply: Callable[[Any], Any]) -> Any:
            """Processes a stage, between waiting for it and requesting another."""
            stage = jax.lax.rem(step - begin, STAGES)
            plgpu.barrier_wait(refs["here"].at[stage])
            product = multiply(stage)

            @pl.when(step + STAGES < end)  # what is asked for again
            def _() -> None:
                plgpu.barrier_arrive(refs["free"].at[stage])

            again = step - 1 + STAGES

            @pl.when((warpgroup == 0) & (step > begin) & (again < end))
            def _() -> None:
                plgpu.barrier_wait(refs["free"].at[jax.lax.rem(step - 1 - begin, STAGES)])
                ask_for(again)

            return product

        if self.code.scales == "sums":
            nothing = filled((64, self.tile), 0.0, plgpu.Layout.WGMMA)

            def step(index: Any, sums: Any) -> Any:
                return turn(index, lambda stage: self.added(refs, stage, warpgroup, sums))

            sums = jax.lax.fori_loop(begin, end, step, nothing)
        else:

            def multiplied(sums: Any) -> Any:
                def step(index: Any, carry: Any) -> Any:
                    turn(index, lambda stage: self.multiply(refs, stage, warpgroup, sums))
                    return carry

                jax.lax.fori_loop(begin, end, step, 0)
                return sums[...]

            sums = pl.run_scoped(multiplied, accumulator(64, self.tile))
        if self.code.scales == "whole":
            sums = sums * self.per_row(refs["scales"].at[member, panels], self.code.factor)
        if "bias" in refs:
            sums = sums + self.per_row(refs["bias"].at[panels])
        rows = pl.ds(0, self.tile)
        store(out.at[split, tile, rows, panels], transposed(sums.astype(out.dtype)))

    def added(self, refs: dict[str, Any], stage: Any, warpgroup: Any, sums: Any) -> Any:
        """Sums and those of a stage's groups, each times its scale."""
        from rooflax.ops.mosaic import accumulator, pl, plgpu

        panels = pl.ds(warpgroup * PANELS, PANELS)
        for group in range(self.together):
            left, right = self.operands(refs, stage, group, warpgroup)

            def multiplied(acc: Any, left: Any = left, right: Any = right) -> Any:
                plgpu.wgmma(acc, left, right)
                return acc[...]

            product = pl.run_scoped(multiplied, accumulator(64, self.tile))
            sums = sums + product * self.per_row(refs["scales_here"].at[stage, panels, group])
        return sums

    def multiply(self, refs: dict[str, Any], stage: Any, warpgroup: Any, sums: Any) -> None:
        """A stage's groups onto the sums."""
        from rooflax.ops.mosaic import plgpu

        for group in range(self.together):
            plgpu.wgmma(sums, *self.operands(refs, stage, group, warpgroup))
        plgpu.wgmma_wait(0)

    def operands(self, refs: dict[str, Any], stage: Any, group: int, warpgroup: Any) -> Any:
        """A group's weights and rows."""
        from rooflax.ops.mosaic import load, pl, plgpu, spread
        from rooflax.ops.mosaic_fragments import rows_of, scales_layout, words_layout

        panels = pl.ds(warpgroup * PANELS, PANELS)
        words = [
            load(refs["words_here"].at[stage, panels, group, pl.ds(64 * at, 64)], words_layout())
            for at in range(self.code.words)
        ]
        left = self.code.unpack(words)
        if self.code.scales == "operand":
            scales = load(refs["scales_here"].at[stage, panels, group], scales_layout())
            scales = rows_of(e8m0(scales)).astype(jnp.bfloat16)
            left = left * spread(scales, (64, GROUP), 0, plgpu.Layout.WGMMA)
        if "operand" in refs:
            refs["operand"][warpgroup] = left
            left = refs["operand"].at[warpgroup]
        return left, refs["x_here"].at[stage, group].transpose((1, 0))

    def per_row(self, ref: Any, factor: float = 1.0) -> Any:
        """Values of outputs [4, 16] as those of sums."""
        from rooflax.ops.mosaic import load, plgpu, spread
        from rooflax.ops.mosaic_fragments import rows_of, scales_layout

        values = rows_of(load(ref, scales_layout()).astype(jnp.float32))
        values = values * np.float32(factor) if factor != 1 else values
        return spread(values, (64, self.tile), 0, plgpu.Layout.WGMMA)
