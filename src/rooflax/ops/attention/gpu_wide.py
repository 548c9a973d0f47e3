"""Attention of few queries with wide heads on a GPU's tensor cores: heads of 320 to 512, and
latents of up to 576, whose first elements are the values.

Both products are computed transposed: keys are the left operand of the scores, and values, read
across their rows, that of the sums. So 8 queries take 8 columns and not 64 rows, which neither
shared memory nor registers would hold. Three tiles of keys and values lie in shared memory, taking
turns, or two of latents; what lies in a place next is asked for as soon as its tile is multiplied.
"""

from __future__ import annotations

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

WIDEST, WIDEST_LATENT = 512, 576
"""Elements of a head, and of a latent."""
COLUMNS = (8, 16)
"""Queries of a program: 24 spill registers, and 32 do not fit beside three tiles of 512."""
MOST_QUERIES = 256
"""Queries of one row and K/V head: two tokens of 128 heads."""
ENOUGH_PROGRAMS = 132
"""One for each of an H200's multiprocessors, whose shared memory it fills."""


def unsupported(q: Any, k_pool: Pool, args: AttentionArgs) -> str | None:
    """Reason why the kernel does not run; None if it does."""
    _, kv_heads, block_size, head_dim = k_pool.values.shape
    kernel, latent = "attention's tensor cores", args.values_in_keys is not None
    if not q.dtype == k_pool.values.dtype == jnp.bfloat16:
        return f"{kernel} take heads of more than {gpu_flash.WIDEST} in bfloat16 only"
    if TILE % block_size or head_dim % TILE or (args.values_in_keys or 0) % TILE:
        return f"{kernel} take heads by {TILE}, in blocks that divide {TILE}"
    widest = WIDEST_LATENT if latent else WIDEST
    if head_dim > widest:
        return f"{kernel} take heads of up to {widest}, not {head_dim}"
    queries = q.shape[1] * (q.shape[2] // kv_heads)
    if queries > MOST_QUERIES:
        return f"{kernel} take up to {MOST_QUERIES} queries of such heads, not {queries}"
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
    num_tiles = -(-table_len * block_size // TILE)
    splits, columns = _sizes_of(rows * kv_heads, num_queries, num_tiles, args, head_dim)
    padding = -num_queries % columns
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.repeat(paging.positions, num_queries // paging.positions.shape[1], axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=NOWHERE)
    paging = replace(paging, positions=positions)
    visits = visible_tiles(paging, args, queries=columns, keys=TILE, num_tiles=num_tiles)
    values = args.values_in_keys or head_dim
    pools = [k_pool.values] if args.values_in_keys else [k_pool.values, v_pool.values]

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
        scratch_types=scratch(head_dim, columns, TILE // block_size, 1 + len(pools)),
    )
    highs, sums, outs = run(q, *pools, *jax.tree.leaves((paging, visits)))
    outs = outs.swapaxes(3, 4)[:, :, :, :num_queries]
    outs = jnp.pad(outs, ((0, 0),) * 4 + ((0, head_dim - values),))
    return highs[:, :, :, :num_queries], sums[:, :, :, :num_queries], outs


def _sizes_of(
    programs: int, num_queries: int, num_tiles: int, args: AttentionArgs, head_dim: int
) -> tuple[int, int]:
    """Shares of the tiles of keys, and queries of a program."""
    window = args.window
    most = num_tiles if window is None else min(num_tiles, window // TILE + 2)
    columns = next((n for n in COLUMNS if n >= num_queries), COLUMNS[-1])

    def shares(columns: int) -> int:
        tiled = programs * -(-num_queries // columns)
        return max(1, min(most // gpu_flash.LEAST_TILES, ENOUGH_PROGRAMS // tiled))

    rule = shares(columns)
    others = [(n, columns) for n in (rule // 2, 2 * rule) if 0 < n <= most]
    narrower = [n for n in COLUMNS if n < columns and n < num_queries]
    splits, columns = block_sizes.of(
        "attention.gpu wide",
        (rounded_up(programs), rounded_up(num_queries), rounded_up(most), head_dim),
        (rule, columns),
        [*others, *((shares(n), n) for n in narrower[-1:])],
    )
    return splits, columns


def scratch(head_dim: int, columns: int, blocks: int, places: int) -> list[Any]:
    """Shared memory for queries, weights, and some tiles of keys and values; and who waits."""
    from rooflax.ops.mosaic import plgpu, swizzled

    def of_bfloat16(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16))

    return [
        of_bfloat16(columns, head_dim),
        of_bfloat16(columns, TILE),
        of_bfloat16(places, TILE, head_dim),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=blocks, num_barriers=places),
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
    highs, sums, outs, q_smem, weights_smem, smem, q_here, here = refs
    row, head, tile, split = (jax.lax.axis_index(a) for a in ("row", "head", "tile", "split"))
    begin, end = begins[row, tile], ends[row, tile]
    each = (end - begin + splits - 1) // splits
    begin = begin + split * each
    end = jnp.minimum(begin + each, end)
    columns, values = q_smem.shape[0], outs.shape[3]
    queries, layout = pl.ds(tile * columns, columns), plgpu.Layout.WGMMA
    by_query, shape = layout.reduce(0), (TILE, columns)
    table_len, block_size = tables.shape[1], pools[0].shape[2]
    blocks, places = TILE // block_size, smem.shape[0]

    def visited(index: Any) -> Any:
        return index if order is None else order[row, tile, index]

    def place_of(index: Any, number: int) -> Any:
        """Of a tile of this pool: keys and values take turns."""
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
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, queries], q_smem, q_here)
        for number in range(-places, 0):
            ask_ahead(begin, number)
        plgpu.barrier_wait(q_here)

    def across(of_queries: Any, rows: int = TILE) -> Any:
        return spread(of_queries, (rows, columns), 1, layout)

    at = across(load(queries_at.at[row, queries], by_query))
    slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    context, first = contexts[row], firsts[row]

    def step(index: Any, state: Any) -> Any:
        high, total, out = state
        place, start = place_of(index, 0), first + visited(index) * TILE
        plgpu.barrier_wait(here.at[place])
        scores = product(smem.at[place], q_smem.transpose((1, 0))) * to_base_2
        scores = jnp.where(sees(at, slots + start, context), scores, LOWEST)
        higher = jnp.maximum(high, scores.max(axis=0))
        above = jnp.maximum(higher, LOWEST / 2)  # a query that has seen nothing weighs nothing
        weights, kept = jnp.exp2(scores - across(above)), jnp.exp2(high - higher)
        narrow = plgpu.layout_cast(weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        weights_smem.transpose((1, 0))[...] = narrow
        plgpu.commit_smem()
        if len(pools) > 1:
            ask_ahead(index, 0)
            place = place_of(index, 1)
            plgpu.barrier_wait(here.at[place])
        without_unwritten(smem.at[place], context - start)
        left = smem.at[place, :, pl.ds(0, values)].transpose((1, 0))
        out = plus_product(out * across(kept, values), left, weights_smem.transpose((1, 0)))
        ask_ahead(index, len(pools) - 1)
        return higher, total * across(kept) + weights, out

    nothing = (
        filled((columns,), LOWEST, by_query),
        filled(shape, 0.0, layout),
        filled((values, columns), 0.0, layout),
    )
    high, total, out = jax.lax.fori_loop(begin, end, step, nothing)
    store(highs.at[row, head, split, queries], high * np.float32(np.log(2)))
    store(sums.at[row, head, split, queries], total.sum(axis=0))
    store(outs.at[row, head, split, :, queries], out)
