"""A decode step's attention on a GPU in two kernels: what the projection gave goes in, pools and
all.

The first is gpu_split.py's split-K with what comes before it: norms and RoPE of queries and keys,
and the new token's K and V, which one warpgroup of a K/V head writes into the pools in place.
Nobody reads them there: the share that writes them begins its softmax with them, from registers.
The second merges the shares, with the sink.

A head is held as two halves, because RoPE turns one element of each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops.attention.args import AttentionArgs, Projected
from rooflax.ops.attention.gpu_split import LOWEST, queries_at_once, shares_of
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import PlainPool, Pool, PoolLeaf

Halves = tuple[Any, Any]


def attention_step(
    new: Projected, k_pool: Pool, v_pool: Pool, sequences: Sequences, args: AttentionArgs
) -> tuple[Float[Array, "T N H"], PoolLeaf, PoolLeaf]:
    """What `Projected` and `paged_attention` say, of rows of one token each."""
    from rooflax.ops.mosaic import launch

    qkv = new.qkv[0]
    rows, kv_heads, group, head_dim = *qkv.shape[:2], qkv.shape[2] - 2, qkv.shape[3]
    table_len = sequences.block_tables.shape[1]
    together = min(queries_at_once(head_dim), group)
    parts = -(-group // together)
    splits = shares_of((rows, kv_heads, group, parts), k_pool.values, table_len, args.window)
    tall = _tile(head_dim)[0]
    padded = -(-splits // tall) * tall
    given: list[Any] = [qkv]
    if new.cos is not None and new.sin is not None:
        given += [new.cos[0], new.sin[0]]
    if new.norms is not None:
        given += new.norms
    given += [sequences.query_lens, sequences.positions, sequences.first_positions]
    given.append(sequences.block_tables)
    pools = [jax.new_ref(pool.values) for pool in (k_pool, v_pool)]

    def attention_shares(*refs: Any) -> None:
        _share(*refs, new=new, args=args, splits=splits, together=together)

    of_shares = jax.ShapeDtypeStruct((rows, kv_heads, group, padded), jnp.float32)
    outs = jax.ShapeDtypeStruct((*of_shares.shape, head_dim), jnp.float32)
    grid = {"part": parts, "head": kv_heads, "row": rows, "split": splits}
    run = launch(attention_shares, (of_shares, of_shares, outs), grid, by_lane=True)
    shares = run(*given, *pools)
    sinks = [] if args.sinks is None else [args.sinks]

    def attention_merged(*refs: Any) -> None:
        _merge(*refs, splits=splits)

    out = jax.ShapeDtypeStruct((rows, kv_heads * group, head_dim), qkv.dtype)
    grid = {"query": group, "head": kv_heads, "row": rows}
    out = launch(attention_merged, out, grid, by_lane=True)(*shares, *sinks)
    k, v = (jax.freeze(pool) for pool in pools)
    return out, k, v


def unsupported(
    new: Projected, k_pool: Pool, v_pool: Pool, sequences: Sequences, args: AttentionArgs
) -> str | None:
    del v_pool
    _, tokens, _, _, head_dim = new.qkv.shape
    if sequences.longest != 1 or tokens != len(sequences.query_lens):
        return "attention's kernel for decode steps takes rows of one token"
    if not isinstance(k_pool, PlainPool) or k_pool.values.dtype == jnp.float16:
        return "attention's kernel for decode steps writes float32 and bfloat16"
    if args.repeat_kv or not args.causal or args.pattern is not None:
        return "attention's kernel for decode steps is causal, without patterns and copies"
    if head_dim % 64 or k_pool.values.shape[2] % _tile(head_dim)[0]:
        return f"attention's kernel for decode steps takes heads by 64, not {head_dim}"
    return None


def _tile(head_dim: int) -> tuple[int, int]:
    """Rows and columns that a warpgroup has of half a head: four columns a thread."""
    return (16, 32) if head_dim // 2 % 64 else (8, 64)


def _layout(head_dim: int) -> Any:
    from rooflax.ops.mosaic import plgpu

    tall, wide = _tile(head_dim)
    tiling = plgpu.Tiling(((tall, wide), (tall // 4, 4)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def _loaded(ref: Any, layout: Any) -> Halves:
    """The halves of the last axis, in float32."""
    from rooflax.ops.mosaic import load, pl

    half, before = ref.shape[-1] // 2, (slice(None),) * (len(ref.shape) - 1)
    both = (load(ref.at[(*before, pl.ds(at, half))], layout) for at in (0, half))
    first, second = (value.astype(jnp.float32) for value in both)
    return first, second


def _stored(ref: Any, values: Halves) -> None:
    from rooflax.ops.mosaic import pl, store

    half = values[0].shape[0]
    for at, value in enumerate(values):
        store(ref.at[pl.ds(at * half, half)], value.astype(ref.dtype))


def _share(
    qkv: Any,
    *refs: Any,
    new: Projected,
    args: AttentionArgs,
    splits: int,
    together: int,
) -> None:
    """Some queries of one row and K/V head over one share of the blocks that they see, the new
    token being the first share's."""
    from rooflax.ops.mosaic import load, pl, plgpu, spread

    row, head, split, part = (jax.lax.axis_index(a) for a in ("row", "head", "split", "part"))
    turns, rest = (refs[:2], refs[2:]) if new.cos is not None else ((), refs)
    norms, rest = (rest[:2], rest[2:]) if new.norms is not None else ((), rest)
    lens, positions, firsts, tables, k_pool, v_pool, highs, sums, outs = rest
    group, head_dim = qkv.shape[2] - 2, qkv.shape[3]
    block_size, half = k_pool.shape[2], head_dim // 2
    layout, shape = _layout(head_dim), (block_size, half)
    of_slot, of_column = layout.reduce(1), layout.reduce(0)
    is_real, position, first = lens[row] > 0, positions[row], firsts[row]
    before = position - first
    angles = [load(ref.at[row], of_column).astype(jnp.float32) for ref in turns]

    def rounded(values: Halves) -> Halves:
        a, b = (value.astype(qkv.dtype).astype(jnp.float32) for value in values)
        return a, b

    def prepared(at: Any, norm: Any) -> Halves:
        a, b = _loaded(qkv.at[row, head, at], of_column)
        if norms:
            mean = (a * a + b * b).sum(axis=0) * np.float32(1 / head_dim)
            scale = jax.lax.rsqrt(mean + np.float32(new.eps))
            of_norm = _loaded(norm, of_column)
            a, b = rounded((a * scale * of_norm[0], b * scale * of_norm[1]))
        if angles:
            cos, sin = angles
            a, b = rounded((a * cos - b * sin, b * cos + a * sin))
        return a, b

    def as_stored(values: Halves) -> Halves:
        a, b = (value.astype(k_pool.dtype).astype(jnp.float32) for value in values)
        return a, b

    key = as_stored(prepared(group, norms[1] if norms else None))
    value = as_stored(_loaded(qkv.at[row, head, group + 1], of_column))
    numbers = [jnp.minimum(part * together + index, group - 1) for index in range(together)]
    queries = []
    for number in numbers:
        a, b = prepared(number, norms[0] if norms else None)
        queries.append((a * np.float32(args.scale), b * np.float32(args.scale)))

    @pl.when(is_real & (split == 0) & (part == 0))
    def _() -> None:
        place = tables[row, before // block_size], head, before % block_size
        _stored(k_pool.at[place], key)
        _stored(v_pool.at[place], value)

    def down(vector: Any) -> Any:
        return spread(vector, shape, 1, layout)

    def across(of_slots: Any) -> Any:
        return spread(of_slots, shape, 0, layout)

    def of_slots(number: float) -> Any:
        return plgpu.layout_cast(jnp.full((block_size,), number, jnp.float32), of_slot)

    slots = plgpu.broadcasted_iota(jnp.int32, (block_size,), 0, layout=of_slot)
    begins = slots == jnp.where(is_real & (split == 0), 0, block_size)
    states = []
    for a, b in queries:
        score = (a * key[0] + b * key[1]).sum(axis=0)
        high = jnp.where(begins, of_slots(0.0) + score, of_slots(LOWEST))
        total = jnp.where(begins, of_slots(1.0), of_slots(0.0))
        out = tuple(jnp.where(across(total) > 0, down(v), 0.0) for v in value)
        states.append((high, total, *out))

    end = jnp.where(is_real, (before + (block_size - 1)) // block_size, 0)
    begin = jnp.int32(0)
    if args.window is not None:
        begin = jnp.minimum(jnp.maximum(before - (args.window - 1), 0) // block_size, end)
    per_split = (end - begin + splits - 1) // splits
    start = begin + split * per_split

    def step(index: Any, states: list[Any]) -> list[Any]:
        block = tables[row, index]
        keys = _loaded(k_pool.at[block, head], layout)
        values = _loaded(v_pool.at[block, head], layout)
        at = slots + (first + index * block_size)
        past = at < position
        # behind the past a block holds what others left, and 0 times NaN is NaN
        values = tuple(jnp.where(across(past.astype(jnp.int32)) > 0, v, 0.0) for v in values)
        seen = past if args.window is None else past & (at > position - args.window)
        taken = []
        for (a, b), (high, total, *out) in zip(queries, states, strict=True):
            scores = (keys[0] * down(a) + keys[1] * down(b)).sum(axis=1)
            scores = jnp.where(seen, scores, LOWEST)
            higher = jnp.maximum(high, scores)
            kept = jnp.exp(high - higher)
            weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
            out = (o * across(kept) + v * across(weights) for o, v in zip(out, values, strict=True))
            taken.append((higher, total * kept + weights, *out))
        return taken

    states = jax.lax.fori_loop(start, jnp.minimum(start + per_split, end), step, states)
    for index, (high, total, *out) in enumerate(states):
        at = part * together + index

        @pl.when(at < group)
        def _(high: Any = high, total: Any = total, out: Any = out, at: Any = at) -> None:
            highest = high.max(axis=0)
            share = jnp.exp(high - highest)
            highs[row, head, at, split] = highest
            sums[row, head, at, split] = (total * share).sum(axis=0)
            _stored(
                outs.at[row, head, at, split], tuple((o * across(share)).sum(axis=0) for o in out)
            )


def _merge(highs: Any, sums: Any, outs: Any, *refs: Any, splits: int) -> None:
    """One softmax of all shares of a query and the sink; zeros where nothing is seen."""
    from rooflax.ops.mosaic import filled, load, pl, plgpu, spread

    *sinks, out_ref = refs
    row, head, query = (jax.lax.axis_index(axis) for axis in ("row", "head", "query"))
    group, head_dim = outs.shape[2], outs.shape[4]
    layout, (tall, _) = _layout(head_dim), _tile(head_dim)
    shape, of_slot = (tall, head_dim // 2), layout.reduce(1)
    slots = plgpu.broadcasted_iota(jnp.int32, (tall,), 0, layout=of_slot)

    def across(of_slots: Any) -> Any:
        return spread(of_slots, shape, 0, layout)

    def step(index: Any, state: Any) -> Any:
        high, total, *out = state
        place = row, head, query, pl.ds(index * tall, tall)
        is_share = slots < splits - index * tall
        other = jnp.where(is_share, load(highs.at[place], of_slot), LOWEST)
        count = jnp.where(is_share, load(sums.at[place], of_slot), 0.0)
        values = _loaded(outs.at[place], layout)
        higher = jnp.maximum(high, other)
        kept, weight = jnp.exp(high - higher), jnp.exp(other - higher)
        real = across(is_share.astype(jnp.int32)) > 0
        out = (
            o * across(kept) + jnp.where(real, v, 0.0) * across(weight)
            for o, v in zip(out, values, strict=True)
        )
        return (higher, total * kept + count * weight, *out)

    def of_slots(number: float) -> Any:
        return plgpu.layout_cast(jnp.full((tall,), number, jnp.float32), of_slot)

    zeros = filled(shape, 0.0, layout)
    state = (of_slots(LOWEST), of_slots(0.0), zeros, zeros)
    high, total, *out = jax.lax.fori_loop(0, -(-splits // tall), step, state)
    number = head * group + query
    sink = sinks[0][number].astype(jnp.float32) if sinks else np.float32(LOWEST)
    highest = jnp.maximum(high.max(axis=0), sink)
    share = jnp.exp(high - highest)
    sum_ = (total * share).sum(axis=0)
    if sinks:
        sum_ = sum_ + jnp.exp(sink - highest)
    inverse = 1.0 / jnp.where(sum_ == 0, np.float32(1), sum_)
    _stored(out_ref.at[row, number], tuple((o * across(share)).sum(axis=0) * inverse for o in out))


BACKEND = Backend(attention_step, unsupported)
