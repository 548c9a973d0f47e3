"""Attention of bfloat16 queries on a GPU's tensor cores: prompts in chunks from any offset, and
decoding, over pools of bfloat16 or int8.

Flash attention. The queries of one row and K/V head are rows of one matrix, their positions beside
them, so that a tile of 64 serves all heads of a group; keys and values come block by block by TMA,
some tiles ahead. Where tiles of queries are too few for the card, programs share the keys that a
tile visits; the caller merges the shares.

Codes of int8 are bfloat16 numbers, so that nothing is rounded as they are upcast, from one place in
shared memory to another: scales of keys multiply the scores, and scales of values the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.gpu_split import LOWEST
from rooflax.ops.attention.plan import NOWHERE, visible_tiles
from rooflax.ops.block_sizes import rounded_up
from rooflax.ops.kv_pool import Pool

TILE = 64
"""Queries, and keys, that a warpgroup multiplies at a time."""
WIDEST = 256
"""Elements of a head: what one product on the tensor cores gives, and shared memory holds."""
STAGES = 2
"""Tiles of keys and values on their way to shared memory: with three a multiprocessor has room for
one program."""
ENOUGH_PROGRAMS = 264
"""Two for each of an H200's 132 multiprocessors: below it contexts are split."""
LEAST_TILES = 2
"""Tiles of keys in a share, so that merging stays small beside reading."""


def flash(
    q: Float[Array, "B K queries H"],
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
    args: AttentionArgs,
) -> tuple[Array, Array, Array]:
    """Flash attention with tensor cores; gives what `split` gives."""
    from rooflax.ops.mosaic import launch

    rows, kv_heads, num_queries, _ = q.shape
    block_size, table_len = k_pool.values.shape[2], paging.block_tables.shape[1]
    padding = -num_queries % TILE
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.repeat(paging.positions, num_queries // paging.positions.shape[1], axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=NOWHERE)
    paging, num_tiles = replace(paging, positions=positions), -(-table_len * block_size // TILE)
    visits = visible_tiles(paging, args, queries=TILE, keys=TILE, num_tiles=num_tiles)

    tiles = q.shape[2] // TILE
    splits, stages = sizes_of(rows * kv_heads * tiles, num_tiles, args.window, k_pool.values)
    pools, coded = [k_pool.values, v_pool.values], k_pool.scales is not None
    if coded:
        pools += [_scales_of(pool, paging.block_tables, num_tiles) for pool in (k_pool, v_pool)]

    def attention_flash(*refs: Any) -> None:
        to_base_2 = np.float32(args.scale * np.log2(np.e))
        listed = visits.order is not None
        q_ref, *rest = refs
        _program(
            q_ref, rest[: len(pools)], *rest[len(pools) :],
            listed=listed, splits=splits, to_base_2=to_base_2, sees=args.sees,
        )  # fmt: skip

    shape = rows, kv_heads, splits, q.shape[2]
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    run = launch(
        attention_flash,
        (numbers, numbers, jax.ShapeDtypeStruct((*shape, q.shape[3]), jnp.float32)),
        {"tile": tiles, "head": kv_heads, "row": rows, "split": splits},
        scratch_types=scratch(q.shape[3], TILE // block_size, stages, coded),
    )
    partials = run(q, *pools, *jax.tree.leaves((paging, visits)))
    highs, sums, outs = (a[:, :, :, :num_queries] for a in partials)
    return highs, sums, outs


def _scales_of(
    pool: Pool, block_tables: Int[Array, "B nb"], num_tiles: int
) -> Float[Array, "B K keys"]:
    """Scales of the rows' keys or values, one after the other: those of a block are fewer bytes
    than TMA copies to."""
    assert pool.scales is not None
    scales = pool.scales[block_tables].swapaxes(1, 2)
    scales = scales.reshape(*scales.shape[:2], -1)
    return jnp.pad(scales, ((0, 0), (0, 0), (0, num_tiles * TILE - scales.shape[2])))


def sizes_of(programs: int, num_tiles: int, window: int | None, pool: Array) -> tuple[int, int]:
    """Shares of the tiles of keys that one of so many programs visits, and tiles on their way."""
    most = num_tiles if window is None else min(num_tiles, window // TILE + 2)
    shares = max(1, min(most // LEAST_TILES, ENOUGH_PROGRAMS // programs))
    others = {shares, *(n for n in (shares // 2, 2 * shares) if 0 < n <= most)}
    splits, stages = block_sizes.of(
        "attention.gpu tiles",
        (rounded_up(programs), rounded_up(most), pool.shape[3], pool.dtype.name),
        (shares, STAGES),
        [(n, stages) for n in sorted(others) for stages in (STAGES, STAGES + 1)],
    )
    return splits, stages


def scratch(head_dim: int, blocks: int, stages: int, coded: bool = False) -> list[Any]:
    """Shared memory for queries, keys and values (some tiles each) and weights; and who waits.

    Args:
        coded: keys and values are int8, with scales, and one tile of each is upcast.
    """
    from rooflax.ops.mosaic import plgpu, swizzled

    def of_bfloat16(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16))

    upcast = () if coded else (stages,)
    found = [
        of_bfloat16(TILE, head_dim),
        of_bfloat16(*upcast, TILE, head_dim),
        of_bfloat16(*upcast, TILE, head_dim),
        of_bfloat16(TILE, TILE),
    ]
    if coded:
        found += [plgpu.SMEM((stages, TILE, head_dim), jnp.int8) for _ in range(2)]
        found += [plgpu.SMEM((stages, TILE), jnp.float32) for _ in range(2)]
    found.append(plgpu.Barrier())
    copies = 2 * blocks + (2 if coded else 0)
    return [*found, plgpu.Barrier(num_arrivals=copies, num_barriers=stages)]


def _program(
    q_ref: Any,
    pools: list[Any],
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
    """A tile of queries of one row and K/V head over a share of the tiles of keys it visits."""
    from rooflax.ops.mosaic import filled, load, pl, plgpu, store

    order, refs = (refs[0], refs[1:]) if listed else (None, refs)
    highs, sums, outs, q_smem, k_smem, v_smem, weights_smem, *coded, q_here, here = refs
    copied = coded or [k_smem, v_smem]
    row, head, tile, split = (jax.lax.axis_index(a) for a in ("row", "head", "tile", "split"))
    begin, end = begins[row, tile], ends[row, tile]
    each = (end - begin + splits - 1) // splits
    begin = begin + split * each
    end = jnp.minimum(begin + each, end)
    queries, layout = pl.ds(tile * TILE, TILE), plgpu.Layout.WGMMA
    table_len, (block_size, head_dim) = tables.shape[1], pools[0].shape[2:]
    blocks, stages = TILE // block_size, copied[0].shape[0]

    def visited(index: Any) -> Any:
        return index if order is None else order[row, tile, index]

    def ask_for(index: Any) -> None:
        stage = jax.lax.rem(index - begin, stages)
        for number in range(blocks):
            slot = jnp.minimum(visited(index) * blocks + number, table_len - 1)
            at = (stage, pl.ds(number * block_size, block_size))
            for pool, smem in zip(pools[:2], copied[:2], strict=True):
                source = pool.at[tables[row, slot], head]
                plgpu.copy_gmem_to_smem(source, smem.at[at], here.at[stage])
        for scales, smem in zip(pools[2:], copied[2:], strict=True):
            source = scales.at[row, head, pl.ds(visited(index) * TILE, TILE)]
            plgpu.copy_gmem_to_smem(source, smem.at[stage], here.at[stage])

    @pl.when(begin < end)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, queries], q_smem, q_here)
        for ahead in range(stages - 1):
            pl.when(begin + ahead < end)(lambda ahead=ahead: ask_for(begin + ahead))
        plgpu.barrier_wait(q_here)

    of_queries = per_row(load(queries_at.at[row, queries], layout.reduce(1)), TILE)
    slots = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)
    context, first = contexts[row], firsts[row]

    def step(index: Any, state: Any) -> Any:
        pl.when(index + (stages - 1) < end)(lambda: ask_for(index + (stages - 1)))
        stage = jax.lax.rem(index - begin, stages)
        plgpu.barrier_wait(here.at[stage])
        start = first + visited(index) * TILE
        scale_of_values: Callable[[], Any] | None = None
        if coded:
            keys, values = k_smem, v_smem
            for smem, codes in zip((keys, values), coded, strict=False):
                upcast(codes.at[stage], smem)
            plgpu.commit_smem()
        else:
            keys, values = k_smem.at[stage], v_smem.at[stage]
        scores = product(q_smem, keys.transpose((1, 0))) * to_base_2
        if coded:
            of_keys, of_values = (smem.at[stage] for smem in coded[2:])
            scores = scores * per_column(load(of_keys, layout.reduce(0)))

            def real_scales() -> Any:
                """Zero behind the context: a block holds what others left there, and 0 times NaN is
                NaN."""
                scales = per_column(load(of_values, layout.reduce(0)))
                return jnp.where(slots + start < context, scales, 0.0)

            scale_of_values = real_scales
        else:
            without_unwritten(values, context - start)
        seen = sees(of_queries, slots + start, context)
        return accumulated(state, scores, seen, weights_smem, values, scale_of_values)

    nothing = (
        filled((TILE,), LOWEST, layout.reduce(1)),
        filled((TILE,), 0.0, layout.reduce(1)),
        filled((TILE, head_dim), 0.0, layout),
    )
    high, total, out = jax.lax.fori_loop(begin, end, step, nothing)
    store(highs.at[row, head, split, queries], high * np.float32(np.log(2)))
    store(sums.at[row, head, split, queries], total)
    store(outs.at[row, head, split, queries], out)


def accumulated(
    state: tuple[Any, Any, Any],
    scores: Any,
    seen: Any,
    weights_smem: Any,
    v_smem: Any,
    scale_of_values: Callable[[], Any] | None = None,
) -> tuple[Any, Any, Any]:
    """One step of the running softmax, to base 2.

    Args:
        state: per query the highest score, the sum of weights, and the weighted values.
        weights_smem: where the tensor cores find them.
        scale_of_values: gives the values' scales, as weights lie.
    """
    from rooflax.ops.mosaic import plgpu

    high, total, out = state
    scores = jnp.where(seen, scores, LOWEST)
    higher = jnp.maximum(high, scores.max(axis=1))
    above = jnp.maximum(higher, LOWEST / 2)  # so that a row that has seen nothing weighs nothing
    weights = jnp.exp2(scores - per_row(above, TILE))
    kept = jnp.exp2(high - higher)
    scaled = weights if scale_of_values is None else weights * scale_of_values()
    weights_smem[...] = scaled.astype(jnp.bfloat16)  # interpret mode takes no registers
    plgpu.commit_smem()
    out = plus_product(out * per_row(kept, out.shape[1]), weights_smem, v_smem)
    return higher, total * kept + weights.sum(axis=1), out


def product(left: Any, right: Any) -> Any:
    """Product of two matrices in shared memory, in registers."""
    from rooflax.ops.mosaic import accumulator, pl, plgpu

    def multiplied(acc: Any) -> Any:
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiplied, accumulator(left.shape[0], right.shape[1]))


def plus_product(sums: Any, left: Any, right: Any) -> Any:
    """Adds in the sums' own registers: with others for the product, 256 columns spill."""
    from rooflax.ops.mosaic import accumulator_of, is_interpreted, pl, plgpu

    if is_interpreted():  # which has no sums that begin with something
        return sums + product(left, right)

    def multiplied(acc: Any) -> None:
        plgpu.wgmma(acc, left, right)
        plgpu.wgmma_wait(0)

    return pl.run_state(multiplied)(accumulator_of(sums))


def per_row(x: Any, columns: int) -> Any:
    from rooflax.ops.mosaic import plgpu, spread

    return spread(x, (TILE, columns), 0, plgpu.Layout.WGMMA)


def per_column(x: Any) -> Any:
    from rooflax.ops.mosaic import plgpu, spread

    return spread(x, (TILE, TILE), 1, plgpu.Layout.WGMMA)


def upcast(codes: Any, smem: Any) -> None:
    """A tile of int8 codes as bfloat16, in shared memory."""
    from rooflax.ops.mosaic import load, pl, plgpu

    for begin in range(0, smem.shape[1], TILE):
        part = pl.ds(begin, TILE)
        some = load(codes.at[:, part], plgpu.Layout.WGMMA)
        smem[:, part] = some.astype(jnp.float32).astype(jnp.bfloat16)


def without_unwritten(v_smem: Any, left: Any) -> None:
    """Zeros for the values behind the first `left` of a tile: a block holds what others left there,
    and 0 times NaN is NaN."""
    from rooflax.ops.mosaic import filled, load, pl, plgpu

    @pl.when(left < TILE)
    def _() -> None:
        layout, shape = plgpu.Layout.WGMMA, (TILE, TILE)
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        for begin in range(0, v_smem.shape[1], TILE):  # all at once would spill heads of 256
            tile = v_smem.at[:, pl.ds(begin, TILE)]
            values = load(tile, layout).astype(jnp.float32)
            values = jnp.where(slots < left, values, filled(shape, 0.0, layout))
            tile[...] = values.astype(jnp.bfloat16)
        plgpu.commit_smem()
