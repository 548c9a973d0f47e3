"""Attention of few queries over wide keys on a GPU's tensor cores: heads of 320 to 512 in bfloat16,
latents of up to 576, whose first elements are the values, and float32.

Both products are computed transposed: keys are the left operand of the scores, and values, read
across their rows, that of the sums. So 8 queries take 8 columns and not 64 rows, which neither
shared memory nor registers would hold. Three tiles of keys and values lie in shared memory, taking
turns, or two of latents; what lies in a place next is asked for as soon as its tile is multiplied.

A float32 is three numbers of bfloat16 that add up to it, and a product of two the six products of
these that its 24 bits show. Keys and values are cut in registers, queries before the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops import block_sizes
from rooflax.ops.attention import gpu_flash
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.gpu_flash import TILE, plus_product, product, without_unwritten
from rooflax.ops.attention.gpu_split import LOWEST
from rooflax.ops.attention.plan import NOWHERE, visible_tiles
from rooflax.ops.block_sizes import rounded_up
from rooflax.ops.kv_pool import Pool

WIDEST, WIDEST_LATENT, WIDEST_FLOAT32 = 512, 576, 128
"""Elements of a head, of a latent, and of a head in float32, of which 256 spill registers."""
TERMS = 3
"""Numbers of bfloat16 that a float32 is cut into."""
PRODUCTS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
"""Terms of two float32 that are multiplied, the smallest products first."""
COLUMNS = (8, 16)
"""Queries of a program: 24 spill registers, and 32 do not fit beside three tiles of 512."""
MOST_QUERIES = 256
"""Queries of one row and K/V head: two tokens of 128 heads."""
MOST_FLOAT32 = 64
"""The same in float32."""
MULTIPROCESSORS, SHARED_BYTES, MOST_HELD = 132, 227 * 1024, 2
"""Multiprocessors of an H200; and programs that one has registers for."""


def unsupported(q: Any, k_pool: Pool, args: AttentionArgs) -> str | None:
    """Reason why the kernel does not run; None if it does."""
    _, kv_heads, block_size, head_dim = k_pool.values.shape
    kernel, latent = "attention's tensor cores", args.values_in_keys is not None
    exact = k_pool.values.dtype == jnp.float32
    if not exact and not q.dtype == k_pool.values.dtype == jnp.bfloat16:
        return f"{kernel} take heads of more than {gpu_flash.WIDEST} in bfloat16 only"
    if TILE % block_size or head_dim % TILE or (args.values_in_keys or 0) % TILE:
        return f"{kernel} take heads by {TILE}, in blocks that divide {TILE}"
    widest = WIDEST_FLOAT32 if exact else WIDEST_LATENT if latent else WIDEST
    if head_dim > widest:
        return f"{kernel} take heads of up to {widest}, not {head_dim}"
    queries, most = q.shape[1] * (q.shape[2] // kv_heads), MOST_FLOAT32 if exact else MOST_QUERIES
    if queries > most:
        return f"{kernel} take up to {most} queries of such heads, not {queries}"
    return None


def wide(
    q: Float[Array, "B K queries H"],
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
    args: AttentionArgs,
) -> tuple[Array, Array, Array]:
    """Attention of few queries with tensor cores; gives what `gpu_split.split` gives."""
    from rooflax.ops.mosaic import launch

    rows, kv_heads, num_queries, head_dim = q.shape
    block_size, table_len = k_pool.values.shape[2], paging.block_tables.shape[1]
    values = args.values_in_keys or head_dim
    pools = [k_pool.values] if args.values_in_keys else [k_pool.values, v_pool.values]
    num_tiles = -(-table_len * block_size // TILE)
    splits, columns = _sizes_of(rows * kv_heads, num_queries, num_tiles, args.window, pools)
    padding = -num_queries % columns
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.repeat(paging.positions, num_queries // paging.positions.shape[1], axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=NOWHERE)
    paging = replace(paging, positions=positions)
    visits = visible_tiles(paging, args, queries=columns, keys=TILE, num_tiles=num_tiles)
    each = (q,)
    if pools[0].dtype == jnp.float32:
        # a cast to bfloat16 and back is nothing to XLA, which may keep more digits
        each = terms(q.astype(jnp.float32), lambda x: jax.lax.reduce_precision(x, 8, 7))

    def attention_wide(q_ref: Any, *refs: Any) -> None:
        to_base_2 = np.float32(args.scale * np.log2(np.e))
        _program(
            q_ref, refs[: len(pools)], *refs[len(pools) :],
            listed=visits.order is not None, splits=splits, to_base_2=to_base_2, sees=args.sees,
        )  # fmt: skip

    queries = q.shape[2]
    numbers = jax.ShapeDtypeStruct((rows, kv_heads, splits, queries), jnp.float32)
    outs = jax.ShapeDtypeStruct((rows, kv_heads, splits, values, queries), jnp.float32)
    run = launch(
        attention_wide,
        (numbers, numbers, outs),
        {"tile": queries // columns, "head": kv_heads, "row": rows, "split": splits},
        scratch_types=scratch(pools, columns),
    )
    q = jnp.stack(each, axis=2).reshape(rows, -1, *q.shape[2:])
    highs, sums, outs = run(q, *pools, *jax.tree.leaves((paging, visits)))
    outs = outs.swapaxes(3, 4)[:, :, :, :num_queries]
    outs = jnp.pad(outs, ((0, 0),) * 4 + ((0, head_dim - values),))
    return highs[:, :, :, :num_queries], sums[:, :, :, :num_queries], outs


def terms(
    x: Any, rounded: Callable[[Any], Any] = lambda x: x.astype(jnp.bfloat16)
) -> tuple[Any, ...]:
    """Numbers of bfloat16, the largest first, that add up to a float32.

    Args:
        rounded: gives the next number of bfloat16, of either type.
    """
    found = []
    for _ in range(TERMS):
        part = rounded(x)
        found.append(part.astype(jnp.bfloat16))
        x = x - part.astype(jnp.float32)
    return tuple(found)


def _sizes_of(
    programs: int, num_queries: int, num_tiles: int, window: int | None, pools: list[Any]
) -> tuple[int, int]:
    """Shares of the tiles of keys, and queries of a program."""
    most = num_tiles if window is None else min(num_tiles, window // TILE + 2)
    columns = next((n for n in COLUMNS if n >= num_queries), COLUMNS[-1])

    def shares(columns: int) -> int:
        enough = MULTIPROCESSORS * min(MOST_HELD, SHARED_BYTES // _nbytes(pools, columns))
        tiled = programs * -(-num_queries // columns)
        return max(1, min(most // gpu_flash.LEAST_TILES, enough // tiled))

    rule, head_dim, dtype = shares(columns), pools[0].shape[3], pools[0].dtype.name
    others = [(n, columns) for n in (rule // 2, 2 * rule) if 0 < n <= most]
    narrower = [n for n in COLUMNS if n < columns and n < num_queries]
    splits, columns = block_sizes.of(
        "attention.gpu wide",
        (rounded_up(programs), rounded_up(num_queries), rounded_up(most), head_dim, dtype),
        (rule, columns),
        [*others, *((shares(n), n) for n in narrower[-1:])],
    )
    return splits, columns


def _shapes(pools: list[Any], columns: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of queries, weights and tiles in shared memory."""
    (head_dim, dtype), places = (pools[0].shape[3], pools[0].dtype), 1 + len(pools)
    parts = (TERMS,) if dtype == jnp.float32 else ()
    return (*parts, columns, head_dim), (*parts, columns, TILE), (places, TILE, head_dim)


def _nbytes(pools: list[Any], columns: int) -> int:
    """Bytes of shared memory, with what Mosaic takes besides."""
    queries, weights, tiles = map(np.prod, _shapes(pools, columns))
    return int(2 * (queries + weights) + pools[0].dtype.itemsize * tiles) + 4096


def scratch(pools: list[Any], columns: int) -> list[Any]:
    """Shared memory for queries, weights, and some tiles of keys and values; who waits; and the
    left operand, where interpretation takes none in registers."""
    from rooflax.ops.mosaic import is_interpreted, plgpu, swizzled

    def of_bfloat16(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16))

    queries, weights, tiles = _shapes(pools, columns)
    blocks, dtype = TILE // pools[0].shape[2], pools[0].dtype
    return [
        of_bfloat16(*queries),
        of_bfloat16(*weights),
        plgpu.SMEM(tiles, dtype) if dtype == jnp.float32 else of_bfloat16(*tiles),
        plgpu.Barrier(num_arrivals=TERMS if dtype == jnp.float32 else 1),
        plgpu.Barrier(num_arrivals=blocks, num_barriers=tiles[0]),
        *([of_bfloat16(TILE, TILE)] if is_interpreted() and dtype == jnp.float32 else []),
    ]


def _program(
    q_ref: Any,
    pools: tuple[Any, ...],
    tables: Any,
    firsts: Any,
    queries_at: Any,
    contexts: Any,
    begins: Any,
    ends: Any,
    *refs: Any,
    listed: bool,
    splits: int,
    to_base_2: np.float32,
    sees: Any,
) -> None:
    """Some queries of one row and K/V head over a share of the tiles of keys that they visit."""
    from rooflax.ops.mosaic import filled, load, pl, plgpu, spread, store

    order, refs = (refs[0], refs[1:]) if listed else (None, refs)
    highs, sums, outs, q_smem, weights_smem, smem, q_here, here, *operand = refs
    row, head, tile, split = (jax.lax.axis_index(a) for a in ("row", "head", "tile", "split"))
    begin, end = begins[row, tile], ends[row, tile]
    each = (end - begin + splits - 1) // splits
    begin = begin + split * each
    end = jnp.minimum(begin + each, end)
    (*parts, columns, head_dim), values = q_smem.shape, outs.shape[3]
    queries, layout = pl.ds(tile * columns, columns), plgpu.Layout.WGMMA
    by_query, shape = layout.reduce(0), (TILE, columns)
    table_len, block_size = tables.shape[1], pools[0].shape[2]
    blocks, places = TILE // block_size, smem.shape[0]

    def visited(index: Any) -> Any:
        return index if order is None else order[row, tile, index]

    def place_of(index: Any, number: int) -> Any:
        """Place of a tile of this pool: keys and values take turns."""
        return jax.lax.rem((index - begin) * len(pools) + number, places)

    def ask_for(index: Any, number: int) -> None:
        place = place_of(index, number)
        for block in range(blocks):
            slot = jnp.minimum(visited(index) * blocks + block, table_len - 1)
            at = (place, pl.ds(block * block_size, block_size))
            source = pools[number].at[tables[row, slot], head]
            plgpu.copy_gmem_to_smem(source, smem.at[at], here.at[place])

    def ask_ahead(index: Any, number: int) -> None:
        """For what comes so many places behind a tile, and so to the same."""
        later, number = divmod(number + places, len(pools))
        pl.when(index + later < end)(lambda: ask_for(index + later, number))

    @pl.when(begin < end)
    def _() -> None:
        for part in range(TERMS if parts else 1):
            place = (q_smem.at[part], head * TERMS + part) if parts else (q_smem, head)
            plgpu.copy_gmem_to_smem(q_ref.at[row, place[1], queries], place[0], q_here)
        for number in range(-places, 0):
            ask_ahead(begin, number)
        plgpu.barrier_wait(q_here)

    def across(of_queries: Any, rows: int = TILE) -> Any:
        return spread(of_queries, (rows, columns), 1, layout)

    at = across(load(queries_at.at[row, queries], by_query))
    slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    context, first = contexts[row], firsts[row]

    def of_weights(number: int) -> Any:
        return weights_smem.at[number].transpose((1, 0))

    def scored(keys: Any) -> Any:
        if not parts:
            return product(keys, q_smem.transpose((1, 0)))
        scores = filled(shape, 0.0, layout)
        for start in range(0, head_dim, TILE):
            part = pl.ds(start, TILE)
            scores = plus_exact_product(
                scores,
                load(keys.at[:, part], layout),
                lambda number, part=part: q_smem.at[number, :, part].transpose((1, 0)),
                *operand,
            )
        return scores

    def summed(sums: Any, tile: Any, left: Any) -> Any:
        """Sums and the weighted values of a tile, of which so many keys are the context's."""
        if not parts:
            without_unwritten(tile, left)
            across_keys = tile.at[:, pl.ds(0, values)].transpose((1, 0))
            return (plus_product(sums[0], across_keys, weights_smem.transpose((1, 0))),)
        found = []
        for number, each in enumerate(sums):
            across_keys = tile.at[:, pl.ds(number * TILE, TILE)].transpose((1, 0))
            numbers = load(across_keys, plgpu.Layout.WGMMA_TRANSPOSED)
            numbers = plgpu.layout_cast(numbers, layout)
            slots = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)
            numbers = jnp.where(slots < left, numbers, 0.0)
            found.append(plus_exact_product(each, numbers, of_weights, *operand))
        return tuple(found)

    def step(index: Any, state: Any) -> Any:
        high, total, out = state
        place, start = place_of(index, 0), first + visited(index) * TILE
        plgpu.barrier_wait(here.at[place])
        scores = scored(smem.at[place]) * to_base_2
        scores = jnp.where(sees(at, slots + start, context), scores, LOWEST)
        higher = jnp.maximum(high, scores.max(axis=0))
        above = jnp.maximum(higher, LOWEST / 2)  # a query that has seen nothing weighs nothing
        weights, kept = jnp.exp2(scores - across(above)), jnp.exp2(high - higher)
        narrow = terms(weights) if parts else (weights.astype(jnp.bfloat16),)
        for number, part in enumerate(narrow):
            turned = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            (of_weights(number) if parts else weights_smem.transpose((1, 0)))[...] = turned
        plgpu.commit_smem()
        if len(pools) > 1:
            ask_ahead(index, 0)
            place = place_of(index, 1)
            plgpu.barrier_wait(here.at[place])
        out = tuple(each * across(kept, each.shape[0]) for each in out)
        out = summed(out, smem.at[place], context - start)
        ask_ahead(index, len(pools) - 1)
        return higher, total * across(kept) + weights, out

    panels = [TILE] * (values // TILE) if parts else [values]
    nothing = (
        filled((columns,), LOWEST, by_query),
        filled(shape, 0.0, layout),
        tuple(filled((rows, columns), 0.0, layout) for rows in panels),
    )
    high, total, out = jax.lax.fori_loop(begin, end, step, nothing)
    store(highs.at[row, head, split, queries], high * np.float32(np.log(2)))
    store(sums.at[row, head, split, queries], total.sum(axis=0))
    for number, each in enumerate(out):
        rows = pl.ds(number * TILE, each.shape[0])
        store(outs.at[row, head, split, rows, queries], each)


def plus_exact_product(
    sums: Any, left: Any, right: Callable[[int], Any], operand: Any = None
) -> Any:
    """Adds the product of a tile in registers and a matrix in shared memory, both of float32.

    Args:
        right: gives a term.
        operand: shared memory for the left one, in interpretation.
    """
    from rooflax.ops.mosaic import accumulator_of, pl, plgpu

    parts = terms(left)
    if operand is not None:
        for a, b in PRODUCTS:
            operand[...] = parts[a]
            sums = sums + product(operand, right(b))
        return sums

    def multiplied(acc: Any) -> None:
        for a, b in PRODUCTS:
            plgpu.wgmma(acc, parts[a], right(b))
        plgpu.wgmma_wait(0)

    return pl.run_state(multiplied)(accumulator_of(sums))
