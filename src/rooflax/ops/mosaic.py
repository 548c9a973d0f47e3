"""Helpers of the GPU kernels: Mosaic GPU's modules, register layouts, loads and launches.

Imported inside functions only, because it brings Pallas. Written for JAX 0.11 and later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_plgpu: Any = plgpu
"""With signatures that are not 0.10.2's, where these functions are never called."""
WORDS_TILE = (32, 16)
"""Rows and outputs of packed words that a warpgroup takes at a time: 16 bytes a thread."""
VALUES_TILE = (8, 64)
"""Rows and columns of plain values that a warpgroup takes at a time: four a thread."""


def words_layout(columns: int = 16) -> Any:
    """Layout of [32, 16] words: a warp has eight rows, a thread a quarter of one of them."""
    tiling = plgpu.Tiling(((32, columns), (8, columns // 4)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def values_layout(tile: tuple[int, int] = VALUES_TILE) -> Any:
    """Layout of a tile of values: a warp has a quarter of its rows, a thread neighbours of one of
    them."""
    rows, columns = tile
    warp_tile = rows // 4, rows * columns // 128
    return plgpu.Layout.TILED(
        plgpu.Tiling((tile, warp_tile)), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
    )


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Swizzle of rows of 128 bytes in shared memory, for the tensor cores and the copies to it."""
    width = 128 // jax.numpy.dtype(dtype).itemsize
    return _plgpu.TilingTransform((8, width)), _plgpu.SwizzleTransform(128)


def accumulator(rows: int, columns: int) -> Any:
    """Sums of a matmul on the tensor cores."""
    return _plgpu.ACC((rows, columns), jax.numpy.float32)


def accumulator_of(sums: jax.Array) -> Any:
    """The same, beginning with these; for `pl.run_state`."""
    return _plgpu.ACC.init(sums)


def is_interpreted() -> bool:
    """Whether kernels are run operation by operation, in tests."""
    from jax._src import config

    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def load(ref: Any, layout: Any = None) -> jax.Array:
    """Loads a reference into registers; from global memory without a stop in shared memory."""
    return _plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Stores to global memory, in whatever pieces the layout has."""
    if hasattr(plgpu, "store"):
        _plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def spread(x: jax.Array, shape: tuple[int, int], axis: int, layout: Any) -> jax.Array:
    """A vector along an axis of a matrix, in registers: the layout is said, and so not searched."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (axis,)), layout)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 constant in registers."""
    return plgpu.layout_cast(jax.numpy.full(shape, value, jax.numpy.float32), layout)


def launch(
    body: Callable[..., None],
    out: Any,
    grid: dict[str, int],
    *,
    scratch_bytes: int = 2048,
    by_lane: bool = False,
    barriers: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """A kernel of one warpgroup per program, unless `options` says more.

    Args:
        out: shapes and types of what it writes.
        grid: names and sizes of its axes.
        scratch_bytes: shared memory for sums over rows.
        by_lane: the body says every layout, which lowers in a fraction of the time that it takes
            Mosaic to infer them.
        barriers: around every access of shared memory; without, the body has its own.
    """
    semantics = plgpu.LoweringSemantics.Lane if by_lane else plgpu.LoweringSemantics.Warpgroup

    return plgpu.kernel(
        body,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=semantics,
            reduction_scratch_bytes=scratch_bytes,
            unsafe_no_auto_barriers=not barriers,
        ),
        **options,
    )


__all__ = [
    "VALUES_TILE",
    "WORDS_TILE",
    "accumulator",
    "accumulator_of",
    "filled",
    "is_interpreted",
    "launch",
    "load",
    "pl",
    "plgpu",
    "spread",
    "store",
    "swizzled",
    "values_layout",
    "words_layout",
]
