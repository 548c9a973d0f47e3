"""Paged attention on TPU: a Pallas kernel that reads the visible blocks where they lie.

It is our own because JAX's have either sinks (splash) or pages (paged, ragged paged), and those in
another layout than the cache's. One program has a tile of queries and some K/V heads; it copies
tiles of blocks into VMEM, the next while the last is scored, and keeps a running softmax. A core
runs one program at a time, so decoding gains nothing from splitting a row's blocks further.

Interpreted it equals its reference, and Mosaic accepts it; no TPU has run it (see ops.tpu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from rooflax.ops import tpu
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.paging import unsupported_by
from rooflax.ops.attention.plan import NOWHERE, visible_tiles
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import Pool
from rooflax.ops.tpu import dot

LOWEST = float(jnp.finfo(jnp.float32).min)


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    num_queries, num_heads = q.shape[1:3]
    k, v = k_pool.values, v_pool.values
    scales = [pool.scales for pool in (k_pool, v_pool) if pool.scales is not None]
    kv_heads, block_size = k.shape[1:3]
    group = num_heads // kv_heads
    tiles = tpu.attention_tiles(
        num_queries,
        group,
        kv_heads,
        block_size,
        q.shape[3],
        k.dtype.itemsize,
        most_keys=None if args.pattern is None else args.pattern.block,
    )
    slots = paging.block_tables.shape[1] * block_size
    paging = replace(
        paging,
        block_tables=_padded(paging.block_tables, tiles.blocks, 0),
        positions=_padded(paging.positions, tiles.queries, NOWHERE),
        context_lens=jnp.minimum(paging.context_lens, paging.first_positions + slots),
    )
    keys, num_tiles = tiles.blocks * block_size, paging.block_tables.shape[1] // tiles.blocks
    visits = visible_tiles(paging, args, queries=tiles.queries, keys=keys, num_tiles=num_tiles)
    where = (paging.block_tables, paging.first_positions, paging.context_lens)
    out = _run(
        (*visits.listed(num_tiles), *where),
        _by_kv_head(_padded(q, tiles.queries, 0), kv_heads),
        jnp.repeat(paging.positions, group, axis=1)[:, :, None],
        _sink_of_each_row(args.sinks, kv_heads, tiles.queries),
        (k, v),
        tuple(_gathered(s, paging.block_tables, tiles.heads) for s in scales),
        tiles=tiles,
        args=args,
    )
    return _by_query(out, group)[:, :num_queries]


def _run(
    scalars: tuple[jax.Array, ...],
    q: Float[Array, "B K R H"],
    positions: Int[Array, "B R 1"],
    sinks: Float[Array, "K tile 1"] | None,
    pools: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array, ...],
    *,
    tiles: tpu.AttentionTiles,
    args: AttentionArgs,
) -> Float[Array, "B K R H"]:
    """The kernel's call; a row of q is one query head of one query."""
    rows, kv_heads, num_rows, head_dim = q.shape
    visits, _, block_tables, _, _ = scalars
    heads, tile, block = tiles.heads, num_rows // visits.shape[1], pools[0].shape[2:]
    column = pltpu.VMEM((heads, tile, 1), jnp.float32)
    of_queries = pl.BlockSpec((1, heads, tile, head_dim), lambda b, h, i, *_: (b, h, i, 0))
    sink = pl.BlockSpec((heads, tile, 1), lambda b, h, i, *_: (h, 0, 0))
    return tpu.call(
        partial(
            _kernel,
            num_visits=visits.shape[2],
            table_length=block_tables.shape[1],
            args=args,
        ),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows, kv_heads // heads, visits.shape[1]),
        in_specs=[
            of_queries,
            pl.BlockSpec((1, tile, 1), lambda b, h, i, *_: (b, i, 0)),
            *([] if sinks is None else [sink]),
            *[pl.BlockSpec(memory_space=pl.ANY)] * (2 + len(scales)),
        ],
        out_specs=of_queries,
        semantics=("parallel", "parallel", "arbitrary"),
        num_scalars=len(scalars),
        scratch=(
            *(pltpu.VMEM((2, tiles.blocks, heads, *block), p.dtype) for p in pools),
            *(pltpu.VMEM((2, heads, tiles.blocks * block[0]), jnp.float32) for _ in scales),
            column,
            column,
            pltpu.VMEM((heads, tile, head_dim), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ),
        name="paged_attention",
    )(
        *(a.reshape(-1) for a in scalars),
        q,
        positions,
        *(() if sinks is None else (sinks,)),
        *pools,
        *scales,
    )


def _kernel(
    visits: Any,
    counts: Any,
    block_tables: Any,
    first_positions: Any,
    context_lens: Any,
    q: Any,
    positions: Any,
    *refs: Any,
    num_visits: int,
    table_length: int,
    args: AttentionArgs,
) -> None:
    """One tile of queries, of some K/V heads of one row, over the tiles of keys it sees."""
    sink, refs = (None, refs) if args.sinks is None else (refs[0], refs[1:])
    num_pools = (len(refs) - 5) // 2
    pools, out, buffers = refs[:num_pools], refs[num_pools], refs[num_pools + 1 : -4]
    *running, semaphores = refs[-4:]
    highest, total, sums = running
    row, part, tile = (pl.program_id(axis) for axis in range(3))
    which = row * pl.num_programs(2) + tile
    _, blocks, heads, block_size, _ = buffers[0].shape
    keys = blocks * block_size

    def for_each_copy(index: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """Applies a function to the copies that bring the index-th visited tile of keys into a
        buffer."""
        visit = visits[which * num_visits + index]

        def of_block(block: Any, _: None) -> None:
            number = block_tables[row * table_length + visit * blocks + block]
            for pool, buffer in zip(pools[:2], buffers[:2], strict=True):
                source = pool.at[number, pl.ds(part * heads, heads)]
                act(pltpu.make_async_copy(source, buffer.at[slot, block], semaphores.at[slot]))

        jax.lax.fori_loop(0, blocks, of_block, None)
        for scales, buffer in zip(pools[2:], buffers[2:], strict=True):
            source = scales.at[row, part, :, pl.ds(pl.multiple_of(visit * keys, keys), keys)]
            act(pltpu.make_async_copy(source, buffer.at[slot], semaphores.at[slot]))

    def visit(index: Any, _: None) -> None:
        slot = jax.lax.rem(index, 2)

        @pl.when(index + 1 < counts[which])
        def _() -> None:
            for_each_copy(index + 1, 1 - slot, lambda copy: copy.start())

        for_each_copy(index, slot, lambda copy: copy.wait())
        start = first_positions[row] + visits[which * num_visits + index] * keys
        there = start + jax.lax.broadcasted_iota(jnp.int32, (q.shape[2], keys), 1)
        here = jnp.broadcast_to(positions[0], there.shape)
        seen = args.sees(here, there, context_lens[row])
        for head in range(heads):
            k, v = (
                buffer[slot, :, head].reshape(keys, -1).astype(q.dtype) for buffer in buffers[:2]
            )
            k_scale, v_scale = [buffer[slot, head : head + 1] for buffer in buffers[2:]] or [
                None,
                None,
            ]
            state = _accumulate(
                q[0, head],
                (k, k_scale),
                (v, v_scale),
                seen,
                tuple(ref[head] for ref in running),
                scale=args.scale,
            )
            for ref, value in zip(running, state, strict=True):
                ref[head] = value

    highest[...] = jnp.full(highest.shape, LOWEST) if sink is None else sink[...]
    total[...] = jnp.full(total.shape, 0.0 if sink is None else 1.0)
    sums[...] = jnp.zeros(sums.shape)

    @pl.when(counts[which] > 0)
    def _() -> None:
        for_each_copy(0, 0, lambda copy: copy.start())

    jax.lax.fori_loop(0, counts[which], visit, None)
    smallest = float(jnp.finfo(jnp.float32).tiny)
    out[0] = (sums[...] / jnp.maximum(total[...], smallest)).astype(out.dtype)


def _accumulate(
    q: Any,
    keys_of: tuple[Any, Any],
    values_of: tuple[Any, Any],
    seen: Any,
    state: tuple[Any, Any, Any],
    *,
    scale: float,
) -> tuple[Any, Any, Any]:
    """One step of the running softmax.

    Args:
        keys_of, values_of: a tile of them, and their scales as one row, or None.
        state: per row the largest score, the sum of weights, and the weighted sum of values.
    """
    (k, k_scales), (v, v_scales), (highest, total, sums) = keys_of, values_of, state
    scores = dot(q, k, (((1,), (1,)), ((), ()))) * scale
    scores = jnp.where(seen, scores if k_scales is None else scores * k_scales, LOWEST)
    new = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
    kept = jnp.exp(highest - new)
    total = total * kept + jnp.sum(weights, axis=1, keepdims=True)
    if v_scales is not None:
        weights = weights * v_scales
    return new, total, sums * kept + dot(weights.astype(q.dtype), v, (((1,), (0,)), ((), ())))


def unsupported(
    q: object, k_pool: Pool, v_pool: Pool, where: object, args: AttentionArgs
) -> str | None:
    del q, v_pool, where
    return unsupported_by("attention's TPU kernel", k_pool, args)


def _padded(x: jax.Array, multiple: int, value: int) -> jax.Array:
    """Pads the second axis to a multiple."""
    missing = -x.shape[1] % multiple
    widths = [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def _by_kv_head(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K R H"]:
    rows, seq, num_heads, head_dim = q.shape
    grouped = q.reshape(rows, seq, kv_heads, num_heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(rows, kv_heads, -1, head_dim)


def _by_query(out: Float[Array, "B K R H"], group: int) -> Float[Array, "B T N H"]:
    rows, kv_heads, _, head_dim = out.shape
    grouped = out.reshape(rows, kv_heads, -1, group, head_dim)
    return grouped.swapaxes(1, 2).reshape(rows, -1, kv_heads * group, head_dim)


def _sink_of_each_row(
    sinks: Float[Array, " N"] | None, kv_heads: int, queries: int
) -> Float[Array, "K tile 1"] | None:
    if sinks is None:
        return None
    by_head = jnp.maximum(sinks.astype(jnp.float32), LOWEST).reshape(kv_heads, 1, -1)
    return jnp.tile(by_head, (1, queries, 1)).reshape(kv_heads, -1, 1)


def _gathered(
    scales: Float[Array, "blocks K block_size"], block_tables: Int[Array, "B nb"], heads: int
) -> Float[Array, "B parts heads S"]:
    """The rows' scales one after the other: 4 bytes for head_dim of values."""
    gathered = scales.at[block_tables].get(mode="promise_in_bounds")  # [B, nb, K, block_size]
    rows, _, kv_heads, _ = gathered.shape
    return gathered.swapaxes(1, 2).reshape(rows, kv_heads // heads, heads, -1)


BACKEND = Backend(paged_attention, unsupported, reads_blocks=True)
