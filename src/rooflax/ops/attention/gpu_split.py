"""Attention of few queries on a GPU (decoding, drafts): split-K.

A warpgroup has one row, one K/V head, up to `queries_at_once` of its queries and a share of the
blocks that they visit. It takes a block's keys and values into registers as [block_size, head_dim],
and each slot of a block has a softmax of its own, so that nothing but the sum over head_dim crosses
threads in the loop; slots are merged here in float32, shares and the sink by the caller.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops import block_sizes
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.plan import visible_tiles
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.kv_pool import Pool

MOST_QUERIES = 64
"""Queries of one row and K/V head, up to which this kernel is used."""
ENOUGH_PROGRAMS = 528
"""Four warpgroups for each of an H200's 132 multiprocessors: below it contexts are split."""
LEAST_BLOCKS = 4
"""Blocks of a share, so that merging stays small beside reading."""
LOWEST = -1e30


def split(
    q: Float[Array, "B K queries H"],
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
    args: AttentionArgs,
) -> tuple[Array, Array, Array]:
    """Highest scores [B, K, splits, queries], sums of weights, and weighted values [..., H].

    Args:
        q: of a K/V head, one query head after the other of each of T tokens.
    """
    from rooflax.ops.mosaic import launch

    rows, kv_heads, num_queries, head_dim = q.shape
    block_size, table_len = k_pool.values.shape[2], paging.block_tables.shape[1]
    together = min(queries_at_once(head_dim), num_queries)
    parts = -(-num_queries // together)
    padding = parts * together - num_queries
    q = q.astype(jnp.float32) * np.float32(args.scale)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    length = paging.positions.shape[1]
    visits = visible_tiles(paging, args, queries=length, keys=block_size, num_tiles=table_len)
    pools = [k_pool.values, v_pool.values]
    pools += [pool.scales for pool in (k_pool, v_pool) if pool.scales is not None]
    sizes = rows, kv_heads, num_queries, parts
    splits = shares_of(sizes, k_pool.values, table_len, args.window)

    def attention_split(q_ref: Any, *refs: Any) -> None:
        _program(
            q_ref,
            refs[: len(pools)],
            *refs[len(pools) :],
            together=together,
            splits=splits,
            group=num_queries // length,
            sees=args.sees,
        )

    result = jax.ShapeDtypeStruct((rows, kv_heads, splits, parts * together, head_dim), jnp.float32)
    grid = {"part": parts, "head": kv_heads, "row": rows, "split": splits}
    run = launch(attention_split, (result,) * 3, grid)
    highs, sums, outs = run(q, *pools, *jax.tree.leaves((paging, visits)))
    queries = slice(0, num_queries)
    return highs[:, :, :, queries, 0], sums[:, :, :, queries, 0], outs[:, :, :, queries]


def queries_at_once(head_dim: int) -> int:
    """Queries that a warpgroup has registers for."""
    return max(1, 512 // head_dim)


def shares_of(
    sizes: tuple[int, int, int, int], pool: Array, table_len: int, window: int | None
) -> int:
    """Shares of blocks that a context goes into.

    Args:
        sizes: rows, K/V heads, queries of one, and warpgroups that these go to.
    """
    rows, kv_heads, num_queries, parts = sizes
    _, _, block_size, head_dim = pool.shape
    window = table_len * block_size if window is None else window
    most = min(table_len, window // block_size + 2)
    (splits,) = block_sizes.of(
        "attention.gpu",
        (
            rounded_up(rows),
            kv_heads,
            rounded_up(num_queries),
            rounded_up(most),
            block_size,
            head_dim,
            pool.dtype.name,
        ),
        (_splits(rows * kv_heads * parts, table_len),),
        [(count,) for count in powers_of_two(most)],
    )
    return splits


def _splits(programs: int, table_len: int) -> int:
    """So many that the whole card has something to read."""
    return max(1, min(table_len // LEAST_BLOCKS, -(-ENOUGH_PROGRAMS // programs)))


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
    together: int,
    splits: int,
    group: int,
    sees: Any,
) -> None:
    """Some queries of one row and K/V head over one share of the blocks they visit."""
    from rooflax.ops.mosaic import filled, load, plgpu, store, values_layout

    *order, highs, sums, outs = refs
    row, head, split, part = (jax.lax.axis_index(a) for a in ("row", "head", "split", "part"))
    begin, end = begins[row, 0], ends[row, 0]
    per_split = (end - begin + splits - 1) // splits
    start = begin + split * per_split
    context, first = contexts[row], firsts[row]
    layout, (block_size, head_dim) = values_layout(), pools[0].shape[2:]
    slots = plgpu.broadcasted_iota(jnp.int32, (block_size,), 0, layout=layout.reduce(1))

    def step(index: Any, states: list[Any]) -> list[Any]:
        visit = order[0][row, 0, index] if order else index
        block = tables[row, visit]
        keys, values = (load(r.at[block, head], layout).astype(jnp.float32) for r in pools[:2])
        scales = [load(r.at[block, head], layout.reduce(1)) for r in pools[2:]]
        at = slots + (first + visit * block_size)
        # behind the context a block holds what others left, and 0 times NaN is NaN
        values = jnp.where(_per_slot(at < context, values), values, 0.0)
        if scales:
            scales[1] = jnp.where(at < context, scales[1], 0.0)
        taken = []
        for number, state in enumerate(states):
            query = part * together + number
            token = jnp.minimum(query // group, queries_at.shape[1] - 1)  # the last ones only pad
            seen = sees(queries_at[row, token], at, context)
            vector = load(q_ref.at[row, head, query], layout.reduce(0))
            taken.append(_accumulated(state, vector, (keys, values), scales, seen))
        return taken

    def of_slots(value: float) -> jax.Array:
        return filled((block_size,), value, layout.reduce(1))

    nothing = (of_slots(LOWEST), of_slots(0.0), filled((block_size, head_dim), 0.0, layout))
    states = jax.lax.fori_loop(
        start, jnp.minimum(start + per_split, end), step, [nothing] * together
    )
    for number, state in enumerate(states):
        place = (row, head, split, part * together + number)
        for ref, value in zip((highs, sums, outs), _of_all_slots(*state), strict=True):
            store(ref.at[place], value)


def _accumulated(
    state: tuple[Any, Any, Any],
    query: Any,
    block: tuple[Any, Any],
    scales: list[Any],
    seen: Any,
) -> tuple[Any, Any, Any]:
    """One step of a query's running softmax, per slot of a block.

    Args:
        state: the highest score, the sum of weights, and the weighted values.
        block: its keys and values.
        scales: of the slots' keys and values, or none.
    """
    (high, total, out), (keys, values) = state, block
    scores = (keys * _per_column(query, keys)).sum(axis=1)
    if scales:
        scores = scores * scales[0]
    scores = jnp.where(seen, scores, LOWEST)
    higher = jnp.maximum(high, scores)
    kept = jnp.exp(high - higher)
    weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
    total = total * kept + weights
    if scales:
        weights = weights * scales[1]
    out = out * _per_slot(kept, out)
    out += values * _per_slot(weights, out)
    return higher, total, out


def _of_all_slots(high: Any, total: Any, out: Any) -> tuple[Any, Any, Any]:
    """One softmax of those of the slots; what has no columns is the same in all of them."""
    of_slots = _per_slot(high, out)
    highest = of_slots.max(axis=0)
    share = jnp.exp(of_slots - _per_column(highest, out))
    return highest, (_per_slot(total, out) * share).sum(axis=0), (out * share).sum(axis=0)


def _per_slot(x: Any, like: Any) -> Any:
    return jax.lax.broadcast_in_dim(x, like.shape, (0,))


def _per_column(x: Any, like: Any) -> Any:
    return jax.lax.broadcast_in_dim(x, like.shape, (1,))
