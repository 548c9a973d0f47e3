"""Attention over the blocks of a pool on a GPU: the blocks are read in place, by their table.

Few queries (decoding, drafts): split-K. A warpgroup has one row, one K/V head, up to `_at_once` of
its queries and a range of blocks. It takes a block's keys and values into registers as [block_size,
head_dim], and each slot of a block has a softmax of its own, so that nothing but the sum over
head_dim crosses threads in the loop; slots, then ranges and the sink, are merged in float32.

Many queries (prompts, in chunks from any offset): flash attention on the tensor cores, in bfloat16.
The queries of one row and K/V head are rows of one matrix, their positions beside them, so that a
tile of 64 serves all heads of a group; keys and values come block by block by TMA, a tile ahead.

Interpret mode shows that the kernel means what the reference says; lowering and assembling for
sm_90a show that it compiles. No GPU has run it yet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.block_sizes import about, powers_of_two
from rooflax.ops.quantization import QuantizedPool

MOST_QUERIES = 64
"""Queries of one row and K/V head up to which the split kernel is used."""
ENOUGH_PROGRAMS = 528
"""Four warpgroups for each of an H200's 132 multiprocessors: below it contexts are split."""
LEAST_BLOCKS = 4
"""Of a range, so that merging stays small beside reading."""
LOWEST = -1e30
FLASH_TILE = 64
"""Queries, and keys, that a warpgroup multiplies at a time."""


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    *,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B T"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None,
    sinks: Float[Array, " N"] | None,
    repeat_kv: bool,
    pattern: Pattern | None = None,
) -> Float[Array, "B T N H"]:
    if repeat_kv:
        raise NotImplementedError("attention's GPU kernel never copies K/V heads (gqa=repeat).")
    if pattern is not None:
        raise NotImplementedError("attention's GPU kernel has no patterns.")
    if isinstance(k_pool, QuantizedPool) and k_pool.values.dtype != jnp.int8:
        raise NotImplementedError("attention's GPU kernel reads no fp8 KV cache.")
    _, kv_heads, block_size, head_dim = k_pool.shape
    if block_size % 8 or head_dim % 64:
        raise NotImplementedError(
            "attention's GPU kernel takes blocks by 8 and heads by 64, "
            f"not {block_size} and {head_dim}."
        )
    rows, length, heads, _ = q.shape
    group = heads // kv_heads
    queries = q.reshape(rows, length, kv_heads, group, head_dim).swapaxes(1, 2)
    queries = queries.reshape(rows, kv_heads, length * group, head_dim)
    attend = _split if length * group <= MOST_QUERIES else _flash
    partials = attend(
        queries,
        k_pool,
        v_pool,
        block_tables,
        first_positions,
        jnp.repeat(positions, group, axis=1),
        context_lens,
        scale,
        window,
    )
    by_query = None
    if sinks is not None:
        of_head = sinks.astype(jnp.float32).reshape(kv_heads, group)
        by_query = jnp.tile(of_head, (1, length))
    out = _merged(*partials, by_query).reshape(rows, kv_heads, length, group, head_dim)
    return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)


def _at_once(head_dim: int) -> int:
    """Queries that a warpgroup has registers for."""
    return max(1, 512 // head_dim)


def _visible_blocks(
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B queries"],
    context_lens: Int[Array, " B"],
    window: int | None,
    block_size: int,
    table_len: int,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The first block of each row's table that some query sees, and the one behind the last."""
    end = jnp.minimum(context_lens, positions.max(axis=1) + 1) - first_positions
    begin = jnp.zeros_like(end)
    if window is not None:
        begin = jnp.maximum(positions.min(axis=1) - (window - 1) - first_positions, 0)
    last = jnp.clip((end + block_size - 1) // block_size, 0, table_len)
    return jnp.minimum(begin // block_size, last), last


def _split(
    q: Float[Array, "B K queries H"],
    k_pool: Any,
    v_pool: Any,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B queries"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """Highest scores [B, K, splits, queries], sums of weights, and weighted values [..., H]."""
    from rooflax.ops.mosaic import filled, launch, load, plgpu, store, values_layout

    rows, kv_heads, num_queries, head_dim = q.shape
    block_size, table_len = k_pool.shape[2], block_tables.shape[1]
    begins, ends = _visible_blocks(
        first_positions, positions, context_lens, window, block_size, table_len
    )
    together = min(_at_once(head_dim), num_queries)
    parts = -(-num_queries // together)
    padding = parts * together - num_queries
    q = q.astype(jnp.float32) * np.float32(scale)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    stored = (k_pool.values if isinstance(k_pool, QuantizedPool) else k_pool).dtype
    most = table_len if window is None else min(table_len, window // block_size + 2)
    (splits,) = block_sizes.of(
        "attention.gpu",
        (about(rows), kv_heads, about(num_queries), about(most), block_size, head_dim, stored.name),
        (_splits(rows * kv_heads * parts, table_len),),
        [(count,) for count in powers_of_two(most)],
    )
    layout, shape = values_layout(), (block_size, head_dim)
    across = partial(jax.lax.broadcast_in_dim, shape=shape)

    def body(q_ref, k_ref, v_ref, *refs):
        *scale_refs, tables, firsts, queries_at, contexts, begins, ends, highs, sums, outs = refs
        row, head, split, part = (jax.lax.axis_index(a) for a in ("row", "head", "split", "part"))
        begin, end = begins[row], ends[row]
        per_split = (end - begin + splits - 1) // splits
        start = begin + split * per_split
        context, first = contexts[row], firsts[row]
        slots = plgpu.broadcasted_iota(jnp.int32, (block_size,), 0, layout=layout.reduce(1))

        def step(index, carry):
            block = tables[row, index]
            keys = load(k_ref.at[block, head], layout).astype(jnp.float32)
            values = load(v_ref.at[block, head], layout).astype(jnp.float32)
            key_scale = value_scale = None
            if scale_refs:
                key_scale, value_scale = (
                    load(ref.at[block, head], layout.reduce(1)) for ref in scale_refs
                )
            at = slots + (first + index * block_size)
            taken = []
            for number, (high, total, out) in enumerate(carry):
                query = part * together + number
                here = queries_at[row, query]
                vector = load(q_ref.at[row, head, query], layout.reduce(0))
                scores = (keys * across(vector, broadcast_dimensions=(1,))).sum(axis=1)
                if key_scale is not None:
                    scores = scores * key_scale
                seen = (at <= here) & (at < context)
                if window is not None:
                    seen &= at > here - window
                scores = jnp.where(seen, scores, LOWEST)
                higher = jnp.maximum(high, scores)
                kept = jnp.exp(high - higher)
                weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
                total = total * kept + weights
                if value_scale is not None:
                    weights = weights * value_scale
                out = out * across(kept, broadcast_dimensions=(0,))
                out += values * across(weights, broadcast_dimensions=(0,))
                taken.append((higher, total, out))
            return taken

        def slot_wise(value):
            return filled((block_size,), value, layout.reduce(1))

        nothing = [(slot_wise(LOWEST), slot_wise(0.0), filled(shape, 0.0, layout))] * together
        found = jax.lax.fori_loop(start, jnp.minimum(start + per_split, end), step, nothing)
        for number, (high, total, out) in enumerate(found):
            of_slots = across(high, broadcast_dimensions=(0,))
            highest = of_slots.max(axis=0)
            share = jnp.exp(of_slots - across(highest, broadcast_dimensions=(1,)))
            place = (row, head, split, part * together + number)
            store(highs.at[place], highest)
            store(sums.at[place], (across(total, broadcast_dimensions=(0,)) * share).sum(axis=0))
            store(outs.at[place], (out * share).sum(axis=0))

    pools = [k_pool, v_pool]
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        pools = [k_pool.values, v_pool.values, k_pool.scales, v_pool.scales]
    result = jax.ShapeDtypeStruct((rows, kv_heads, splits, parts * together, head_dim), jnp.float32)
    grid = {"part": parts, "head": kv_heads, "row": rows, "split": splits}
    run = launch(body, (result,) * 3, grid)
    highs, sums, outs = run(
        q, *pools, block_tables, first_positions, positions, context_lens, begins, ends
    )
    queries = slice(0, num_queries)
    return highs[:, :, :, queries, 0], sums[:, :, :, queries, 0], outs[:, :, :, queries]


def _splits(programs: int, table_len: int) -> int:
    """Ranges of blocks that a context goes into, so that the whole card has something to read."""
    return max(1, min(table_len // LEAST_BLOCKS, -(-ENOUGH_PROGRAMS // programs)))


def _flash(
    q: Float[Array, "B K queries H"],
    k_pool: Any,
    v_pool: Any,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B queries"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """What `_split` gives, of one range."""
    from rooflax.ops.mosaic import accumulator, filled, launch, load, pl, plgpu, store, swizzled

    if isinstance(k_pool, QuantizedPool) or not (q.dtype == k_pool.dtype == jnp.bfloat16):
        raise NotImplementedError(
            f"attention's GPU kernel takes more than {MOST_QUERIES} queries of a K/V head in "
            "bfloat16 over bfloat16 only."
        )
    rows, kv_heads, num_queries, head_dim = q.shape
    block_size, table_len = k_pool.shape[2], block_tables.shape[1]
    if FLASH_TILE % block_size:
        raise NotImplementedError(f"attention's tensor cores take no blocks of {block_size}.")
    together, padding = FLASH_TILE // block_size, -num_queries % FLASH_TILE
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    tiles = q.shape[2] // FLASH_TILE
    by_tile = (rows * tiles, FLASH_TILE)
    padded = jnp.pad(positions, ((0, 0), (0, padding)), mode="edge")  # seen by nobody
    begins, ends = _visible_blocks(
        jnp.repeat(first_positions, tiles),
        padded.reshape(by_tile),
        jnp.repeat(context_lens, tiles),
        window,
        block_size,
        table_len,
    )
    begins, ends = begins // together, -(-ends // together)
    layout, shape = plgpu.Layout.WGMMA, (FLASH_TILE, FLASH_TILE)
    to_base_2 = np.float32(scale * np.log2(np.e))

    def body(q_ref, k_ref, v_ref, tables, firsts, queries_at, contexts, begins, ends, *rest):
        highs, sums, outs, q_smem, k_smem, v_smem, weights_smem, q_here, here = rest
        row, head, tile = (jax.lax.axis_index(axis) for axis in ("row", "head", "tile"))
        begin, end = begins[row * tiles + tile], ends[row * tiles + tile]
        queries = pl.ds(tile * FLASH_TILE, FLASH_TILE)
        context, first = contexts[row], firsts[row]

        def ask_for(index):
            for number in range(together):
                slot = jnp.minimum(index * together + number, table_len - 1)
                at = (index % 2, pl.ds(number * block_size, block_size))
                for pool, smem in ((k_ref, k_smem), (v_ref, v_smem)):
                    source = pool.at[tables[row, slot], head]
                    plgpu.copy_gmem_to_smem(source, smem.at[at], here.at[index % 2])

        @pl.when(begin < end)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, queries], q_smem, q_here)
            ask_for(begin)
            plgpu.barrier_wait(q_here)

        positions = load(queries_at.at[row, queries], layout.reduce(1))
        of_queries = jax.lax.broadcast_in_dim(positions, shape, (0,))
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

        def step(index, carry):
            high, total, out = carry
            pl.when(index + 1 < end)(lambda: ask_for(index + 1))
            plgpu.barrier_wait(here.at[index % 2])

            def scored(found):
                plgpu.wgmma(found, q_smem, k_smem.at[index % 2].transpose((1, 0)))
                return found[...]

            scores = pl.run_scoped(scored, accumulator(*shape)) * to_base_2
            keys = slots + (first + index * FLASH_TILE)
            seen = (keys <= of_queries) & (keys < context)
            if window is not None:
                seen &= keys > of_queries - window
            scores = jnp.where(seen, scores, LOWEST)
            higher = jnp.maximum(high, scores.max(axis=1))
            weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(higher, shape, (0,)))
            weights = jnp.where(seen, weights, 0.0)
            kept = jnp.exp2(high - higher)
            weights_smem[...] = weights.astype(jnp.bfloat16)  # interpret mode takes no registers
            plgpu.commit_smem()

            def weighted(found):
                plgpu.wgmma(found, weights_smem, v_smem.at[index % 2])
                return found[...]

            more = pl.run_scoped(weighted, accumulator(FLASH_TILE, head_dim))
            out = out * jax.lax.broadcast_in_dim(kept, out.shape, (0,)) + more
            return higher, total * kept + weights.sum(axis=1), out

        of_rows = (FLASH_TILE,)
        nothing = (
            filled(of_rows, LOWEST, layout.reduce(1)),
            filled(of_rows, 0.0, layout.reduce(1)),
            filled((FLASH_TILE, head_dim), 0.0, layout),
        )
        high, total, out = jax.lax.fori_loop(begin, end, step, nothing)
        store(highs.at[row, head, queries], high * np.float32(np.log(2)))
        store(sums.at[row, head, queries], total)
        store(outs.at[row, head, queries], out)

    numbers = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    keys_smem = plgpu.SMEM((2, FLASH_TILE, head_dim), jnp.bfloat16, transforms=swizzled(q.dtype))
    scratch = [
        plgpu.SMEM((FLASH_TILE, head_dim), jnp.bfloat16, transforms=swizzled(q.dtype)),
        keys_smem,
        keys_smem,
        plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(q.dtype)),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * together, num_barriers=2),
    ]
    grid = {"tile": tiles, "head": kv_heads, "row": rows}
    run = launch(
        body,
        (numbers, numbers, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        grid,
        scratch_types=scratch,
    )
    padded = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    found = run(
        q, k_pool, v_pool, block_tables, first_positions, padded, context_lens, begins, ends
    )
    highs, sums, outs = (a[:, :, None, :num_queries] for a in found)
    return highs, sums, outs


def _merged(
    highs: Float[Array, "B K splits queries"],
    sums: Float[Array, "B K splits queries"],
    outs: Float[Array, "B K splits queries H"],
    sinks: Float[Array, "K queries"] | None,
) -> Float[Array, "B K queries H"]:
    """One softmax of all ranges and the sink; zeros where nothing is seen."""
    highest = highs.max(axis=2)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None])
    shares = jnp.exp(highs - highest[:, :, None])
    total = (sums * shares).sum(axis=2)
    if sinks is not None:
        total = total + jnp.exp(sinks[None] - highest)
    out = (outs * shares[..., None]).sum(axis=2)
    return out / jnp.where(total == 0, 1.0, total)[..., None]
