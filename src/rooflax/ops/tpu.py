"""Helpers of the TPU's Pallas kernels: the sizes of their tiles, and their calls.

Interpreted on CPU they are shown to compute what their references compute, and Mosaic, the
compiler behind Pallas on TPU, accepts them. No TPU has run them: tile sizes are reasoned from the
sizes of the memories (16 MiB of VMEM for a kernel, tiles of 8 x 128), where `ops.block_sizes` has
no measured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import rounded_up
from rooflax.ops.dot import Dims
from rooflax.ops.tiles import LANES, up_to

SUBLANES = 32
"""Rows of an int8 tile; bfloat16 has half as many, float32 a quarter."""


@dataclass(frozen=True)
class AttentionTiles:
    """Sizes of one turn of the attention kernel.

    Attributes:
        queries: new tokens of a row; each stands for all query heads of its K/V head.
        heads: K/V heads; divides their number.
        blocks: of the cache, whose keys are scored at once.
    """

    queries: int
    heads: int
    blocks: int


def attention_tiles(
    queries: int,
    group: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    itemsize: int,
    most_keys: int | None = None,
) -> AttentionTiles:
    """Tile sizes of attention: at most 256 rows of scores, 8 heads, 512 keys and 1 MiB of keys, or
    as measured.

    Args:
        queries: new tokens per row.
        group: query heads per K/V head.
        itemsize: bytes per element of the pools.
        most_keys: a bound more, but a block they are always.
    """
    rows = max(1, 256 // group)
    fits = queries <= rows
    tiles = [rows] if fits else [max(8, rows // 8 * 8), max(8, rows // 16 * 8)]
    candidates = []
    for heads in (n for n in range(min(kv_heads, 8), 0, -1) if kv_heads % n == 0):
        keys = min(512, most_keys or 512, (1 << 20) // (heads * up_to(head_dim, LANES) * itemsize))
        blocks = max(1, keys // block_size)
        fewer = sorted({blocks, blocks // 2, blocks // 4} - {0}, reverse=True)
        candidates += [(tile, heads, blocks) for blocks in fewer for tile in tiles]
    shape = (rounded_up(queries), group, kv_heads, block_size, head_dim, itemsize, most_keys or 0)
    tile, heads, blocks = block_sizes.of("attention.tpu", shape, candidates[0], candidates)
    return AttentionTiles(queries if fits else tile, heads, blocks)


@dataclass(frozen=True)
class MatmulTiles:
    """Sizes of one turn of the matmul kernel: inputs (all of them, or a divisor), and outputs."""

    inner: int
    outer: int


def matmul_tiles(tiles: int, rows: int, inner: int, outer: int, code: str) -> MatmulTiles:
    """Tile sizes of a matmul: at most 2^19 weights, which are 2 MiB in float32, with inputs in
    1024s or whole if those do not divide them, or as measured.

    Args:
        tiles: of rows of activations.
        rows: in each.
        code: of the weights.
    """
    candidates = []
    for size in [n for n in (2048, 1024) if inner % n == 0] or [inner]:
        most = min(max(LANES, (1 << 19) // size // LANES * LANES), up_to(outer, LANES))
        fewer = {most, *(up_to(most // part, LANES) for part in (2, 4))}
        candidates += [(size, columns) for columns in sorted(fewer, reverse=True)]
    shape = (rounded_up(tiles), rounded_up(rows), inner, outer, code)
    return MatmulTiles(*block_sizes.of("linear.tpu", shape, candidates[0], candidates))


def tokens_per_tile(num_pairs: int, num_experts: int) -> int:
    """A power of two near the tokens that an expert can expect: 32 to 128."""
    tile = SUBLANES
    while tile < LANES and tile * num_experts < num_pairs:
        tile *= 2
    return tile


def dot(a: jax.Array, b: jax.Array, dimension_numbers: Dims) -> jax.Array:
    """Product of operands of one type, in float32 (int8 ones in int32); float32 is multiplied as
    such."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    result = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(a, b, dimension_numbers, precision, preferred_element_type=result)


def in_place(x: jax.Array) -> jax.Array:
    """x where it is, in HBM: XLA would bring a small stack to VMEM whole."""
    return x if interpreted() else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def interpreted() -> bool:
    """Whether kernels are interpreted, operation by operation, instead of compiled: in tests."""
    return False


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_specs: Any,
    semantics: tuple[Literal["parallel", "arbitrary"], ...],
    num_scalars: int = 0,
    scratch: tuple[Any, ...] = (),
    name: str,
) -> Callable[..., Any]:
    """pl.pallas_call of a kernel whose first arguments are scalars, known before a tile is fetched.

    Args:
        semantics: of the grid's axes.
    """
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=num_scalars,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
    )
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpreted(),
        name=name,
    )
