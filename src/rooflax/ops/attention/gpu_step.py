"""A decode step's attention on a GPU in two kernels: what the projection gave goes in, pools and
all.

The first is the loop of gpu_flash.py, of bfloat16, or of gpu_split.py, with what comes before it:
norms and RoPE of queries and keys, and the new token's K and V, which one warpgroup of a K/V head
writes into the pools in place. Nobody reads them there: the share that writes them begins its
softmax with them, from registers. The second merges the shares, with the sink.

A head is held as two halves, because RoPE turns one element of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops.attention import gpu_flash
from rooflax.ops.attention.args import AttentionArgs, Projected
from rooflax.ops.attention.gpu_flash import TILE, accumulated, product, sizes_of, without_unwritten
from rooflax.ops.attention.gpu_split import LOWEST, queries_at_once, shares_of
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import PlainPool, Pool, PoolLeaf

Halves = tuple[Any, Any]


def attention_step(
    new: Projected, k_pool: Pool, v_pool: Pool, sequences: Sequences, args: AttentionArgs
) -> tuple[Float[Array, "T N H"], PoolLeaf, PoolLeaf]:
    """Attention step, see `Projected` and `paged_attention`, for rows of one token each."""
    from rooflax.ops.mosaic import launch

    qkv = new.qkv[0]
    rows, kv_heads, group, head_dim = *qkv.shape[:2], qkv.shape[2] - 2, qkv.shape[3]
    table_len, block_size = sequences.block_tables.shape[1], k_pool.values.shape[2]
    on_tensor_cores = _takes_tensor_cores(k_pool.values, qkv.dtype, group)
    together = min(queries_at_once(head_dim), group)
    parts = 1 if on_tensor_cores else -(-group // together)
    stages = 0
    if on_tensor_cores:
        num_tiles = -(-table_len * block_size // TILE)
        splits, stages = sizes_of(rows * kv_heads, num_tiles, args.window, k_pool.values)
    else:
        splits = shares_of((rows, kv_heads, group, parts), k_pool.values, table_len, args.window)
    tall = _tile(head_dim)[0]
    padded = -(-splits // tall) * tall
    operands: list[Any] = [qkv]
    if new.cos is not None and new.sin is not None:
        operands += [new.cos[0], new.sin[0]]
    if new.norms is not None:
        operands += new.norms
    operands += [sequences.query_lens, sequences.positions, sequences.first_positions]
    operands.append(sequences.block_tables)
    pools = [jax.new_ref(pool.values) for pool in (k_pool, v_pool)]

    def attention_shares(*refs: Any, **memory: Any) -> None:
        share = _Share(new, args, splits, together, memory)
        (share.by_tiles if on_tensor_cores else share.by_blocks)(*refs)

    queries = TILE if on_tensor_cores else group
    of_shares = jax.ShapeDtypeStruct((rows, kv_heads, padded, queries), jnp.float32)
    outs = jax.ShapeDtypeStruct((*of_shares.shape, head_dim), jnp.float32)
    grid = {"part": parts, "head": kv_heads, "row": rows, "split": splits}
    scratch = _scratch(head_dim, block_size, stages) if on_tensor_cores else {}
    results = of_shares, of_shares, outs
    run = launch(attention_shares, results, grid, by_lane=True, scratch_types=scratch)
    shares = run(*operands, *pools)
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
    if args.repeat_kv or not args.causal or args.pattern is not None or args.cap is not None:
        return "attention's kernel for decode steps is causal, without patterns, caps and copies"
    if head_dim > gpu_flash.WIDEST and new.qkv.dtype == k_pool.values.dtype == jnp.bfloat16:
        return f"attention's tensor cores take steps of heads of up to {gpu_flash.WIDEST} only"
    if head_dim % 64 or k_pool.values.shape[2] % _tile(head_dim)[0]:
        return f"attention's kernel for decode steps takes heads by 64, not {head_dim}"
    return None


def _takes_tensor_cores(pool: Any, dtype: Any, group: int) -> bool:
    """Whether `gpu_flash`'s loop is used, of queries that are a part of its tile."""
    block_size, head_dim = pool.shape[2:]
    if not dtype == pool.dtype == jnp.bfloat16:
        return False
    return TILE % block_size == 0 and head_dim <= gpu_flash.WIDEST and group <= TILE


def _scratch(head_dim: int, block_size: int, stages: int) -> dict[str, Any]:
    """`gpu_flash`'s, and what the new token brings."""
    from rooflax.ops.mosaic import plgpu

    *flash, _, here = gpu_flash.scratch(head_dim, TILE // block_size, stages)
    return dict(zip(("q", "k", "v", "weights"), flash, strict=True)) | {
        "here": here,
        "plain": plgpu.SMEM((TILE, head_dim), jnp.bfloat16),
        "key": plgpu.SMEM((head_dim,), jnp.float32),
        "value": plgpu.SMEM((head_dim,), jnp.float32),
        "written": plgpu.Barrier(),
    }


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


@dataclass(frozen=True)
class _Share:
    """A program: some queries of one row and K/V head over one share of the keys that they see, the
    new token being the first share's.

    Attributes:
        splits: shares.
        together: queries, where the tensor cores do not take them.
        memory: shared, where they do.
    """

    new: Projected
    args: AttentionArgs
    splits: int
    together: int
    memory: dict[str, Any]

    def named_refs(
        self, qkv: Any, *refs: Any
    ) -> tuple[dict[str, Any], Halves, Halves, Callable[[Any], Halves]]:
        """References by name; the new key and value, rounded; and what gives a query."""
        from rooflax.ops.mosaic import load

        new = self.new
        turns, rest = (refs[:2], refs[2:]) if new.cos is not None else ((), refs)
        norms, rest = (rest[:2], rest[2:]) if new.norms is not None else ((), rest)
        names = "lens", "positions", "firsts", "tables", "k", "v", "highs", "sums", "outs"
        by_name: dict[str, Any] = dict(zip(names, rest, strict=True))
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        group, head_dim = qkv.shape[2] - 2, qkv.shape[3]
        of_column = _layout(head_dim).reduce(0)
        angles = [load(ref.at[row], of_column).astype(jnp.float32) for ref in turns]

        def rounded(values: Halves, dtype: Any = qkv.dtype) -> Halves:
            a, b = (value.astype(dtype).astype(jnp.float32) for value in values)
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

        key = rounded(prepared(group, norms[1] if norms else None), by_name["k"].dtype)
        value = rounded(_loaded(qkv.at[row, head, group + 1], of_column), by_name["v"].dtype)
        return by_name, key, value, partial(prepared, norm=norms[0] if norms else None)

    def write(self, refs: dict[str, Any], key: Halves, value: Halves) -> None:
        """The new key and value to the pools, by one program of a K/V head."""
        from rooflax.ops.mosaic import pl

        row, head, split, part = (jax.lax.axis_index(a) for a in ("row", "head", "split", "part"))
        before, block_size = refs["positions"][row] - refs["firsts"][row], refs["k"].shape[2]

        @pl.when((refs["lens"][row] > 0) & (split == 0) & (part == 0))
        def _() -> None:
            place = refs["tables"][row, before // block_size], head, before % block_size
            _stored(refs["k"].at[place], key)
            _stored(refs["v"].at[place], value)

    def visited(self, refs: dict[str, Any], keys: int) -> tuple[Any, Any]:
        """The first and the last of this share's tiles of so many keys."""
        row, split = jax.lax.axis_index("row"), jax.lax.axis_index("split")
        before = refs["positions"][row] - refs["firsts"][row]
        end = jnp.where(refs["lens"][row] > 0, (before + (keys - 1)) // keys, 0)
        begin = jnp.int32(0)
        if self.args.window is not None:
            begin = jnp.minimum(jnp.maximum(before - (self.args.window - 1), 0) // keys, end)
        each = (end - begin + self.splits - 1) // self.splits
        start = begin + split * each
        return start, jnp.minimum(start + each, end)

    def sees(self, at: Any, position: Any) -> Any:
        """Mask of the past keys that are seen."""
        past = at < position
        window = self.args.window
        return past if window is None else past & (at > position - window)

    def by_tiles(self, qkv: Any, *operands: Any) -> None:
        """All queries of a K/V head on the tensor cores: `gpu_flash`'s loop."""
        from rooflax.ops.mosaic import filled, load, pl, plgpu, spread, store

        memory, layout = self.memory, plgpu.Layout.WGMMA
        group, head_dim = qkv.shape[2] - 2, qkv.shape[3]
        row, head, split = (jax.lax.axis_index(axis) for axis in ("row", "head", "split"))
        refs, key, value, query = self.named_refs(qkv, *operands)
        k_smem, v_smem, here = memory["k"], memory["v"], memory["here"]
        position, first = refs["positions"][row], refs["firsts"][row]
        begin, end = self.visited(refs, TILE)
        table_len, block_size = refs["tables"].shape[1], refs["k"].shape[2]
        blocks, stages = TILE // block_size, k_smem.shape[0]

        def ask_for(index: Any) -> None:
            stage = jax.lax.rem(index - begin, stages)
            for number in range(blocks):
                slot = jnp.minimum(index * blocks + number, table_len - 1)
                at = (stage, pl.ds(number * block_size, block_size))
                for pool, smem in ((refs["k"], k_smem), (refs["v"], v_smem)):
                    source = pool.at[refs["tables"][row, slot], head]
                    plgpu.copy_gmem_to_smem(source, smem.at[at], here.at[stage])

        for ahead in range(stages - 1):
            pl.when(begin + ahead < end)(lambda ahead=ahead: ask_for(begin + ahead))
        self.write(refs, key, value)
        to_base_2 = np.float32(self.args.scale * np.log2(np.e))
        for number in range(group):
            _stored(memory["plain"].at[number], query(number))
        _stored(memory["key"], key)
        _stored(memory["value"], value)
        plgpu.barrier_arrive(memory["written"])
        plgpu.barrier_wait(memory["written"])
        by_query, by_element, shape = layout.reduce(1), layout.reduce(0), (TILE, head_dim)
        queries = load(memory["plain"], layout)
        memory["q"][...] = queries
        plgpu.commit_smem()
        key = spread(load(memory["key"], by_element), shape, 1, layout)
        scores = (queries.astype(jnp.float32) * key).sum(axis=1) * to_base_2
        rows = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=by_query)
        begins = rows < jnp.where((refs["lens"][row] > 0) & (split == 0), TILE, 0)
        high = jnp.where(begins, scores, LOWEST)
        total = jnp.where(begins, filled((TILE,), 1.0, by_query), 0.0)
        out = spread(load(memory["value"], by_element), shape, 1, layout)
        out = out * spread(total, shape, 0, layout)
        slots = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)

        def step(index: Any, state: Any) -> Any:
            pl.when(index + (stages - 1) < end)(lambda: ask_for(index + (stages - 1)))
            stage, start = jax.lax.rem(index - begin, stages), first + index * TILE
            plgpu.barrier_wait(here.at[stage])
            scores = product(memory["q"], k_smem.at[stage].transpose((1, 0))) * to_base_2
            without_unwritten(v_smem.at[stage], position - start)
            seen = self.sees(slots + start, position)
            return accumulated(state, scores, seen, memory["weights"], v_smem.at[stage])

        high, total, out = jax.lax.fori_loop(begin, end, step, (high, total, out))
        store(refs["highs"].at[row, head, split], high * np.float32(np.log(2)))
        store(refs["sums"].at[row, head, split], total)
        store(refs["outs"].at[row, head, split], out)

    def by_blocks(self, qkv: Any, *operands: Any) -> None:
        """Some queries: `gpu_split`'s loop."""
        from rooflax.ops.mosaic import pl, plgpu, spread

        row, head, split, part = (jax.lax.axis_index(a) for a in ("row", "head", "split", "part"))
        refs, key, value, query = self.named_refs(qkv, *operands)
        group, head_dim = qkv.shape[2] - 2, qkv.shape[3]
        block_size, half = refs["k"].shape[2], head_dim // 2
        layout, shape = _layout(head_dim), (block_size, half)
        of_slot = layout.reduce(1)
        position, first = refs["positions"][row], refs["firsts"][row]
        self.write(refs, key, value)
        scale = np.float32(self.args.scale)
        queries = []
        for index in range(self.together):
            a, b = query(jnp.minimum(part * self.together + index, group - 1))
            queries.append((a * scale, b * scale))

        def down(vector: Any) -> Any:
            return spread(vector, shape, 1, layout)

        def across(of_slots: Any) -> Any:
            return spread(of_slots, shape, 0, layout)

        def of_slots(number: float) -> Any:
            return plgpu.layout_cast(jnp.full((block_size,), number, jnp.float32), of_slot)

        slots = plgpu.broadcasted_iota(jnp.int32, (block_size,), 0, layout=of_slot)
        begins = slots == jnp.where((refs["lens"][row] > 0) & (split == 0), 0, block_size)
        states = []
        for a, b in queries:
            score = (a * key[0] + b * key[1]).sum(axis=0)
            high = jnp.where(begins, of_slots(0.0) + score, of_slots(LOWEST))
            total = jnp.where(begins, of_slots(1.0), of_slots(0.0))
            out = tuple(jnp.where(across(total) > 0, down(v), 0.0) for v in value)
            states.append((high, total, *out))

        def step(index: Any, states: list[Any]) -> list[Any]:
            block = refs["tables"][row, index]
            keys = _loaded(refs["k"].at[block, head], layout)
            values = _loaded(refs["v"].at[block, head], layout)
            at = slots + (first + index * block_size)
            past = at < position
            # behind the past a block holds what others left, and 0 times NaN is NaN
            values = tuple(jnp.where(across(past.astype(jnp.int32)) > 0, v, 0.0) for v in values)
            seen = self.sees(at, position)
            taken = []
            for (a, b), (high, total, *out) in zip(queries, states, strict=True):
                scores = (keys[0] * down(a) + keys[1] * down(b)).sum(axis=1)
                scores = jnp.where(seen, scores, LOWEST)
                higher = jnp.maximum(high, scores)
                kept = jnp.exp(high - higher)
                weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
                out = (
                    o * across(kept) + v * across(weights) for o, v in zip(out, values, strict=True)
                )
                taken.append((higher, total * kept + weights, *out))
            return taken

        states = jax.lax.fori_loop(*self.visited(refs, block_size), step, states)
        for index, (high, total, *out) in enumerate(states):
            at = part * self.together + index

            @pl.when(at < group)
            def _(high: Any = high, total: Any = total, out: Any = out, at: Any = at) -> None:
                highest = high.max(axis=0)
                share, place = jnp.exp(high - highest), (row, head, split, at)
                refs["highs"][place] = highest
                refs["sums"][place] = (total * share).sum(axis=0)
                _stored(refs["outs"].at[place], tuple((o * across(share)).sum(axis=0) for o in out))


def _merge(highs: Any, sums: Any, outs: Any, *refs: Any, splits: int) -> None:
    """One softmax of all shares of a query and the sink; zeros where nothing is seen."""
    from rooflax.ops.mosaic import filled, load, pl, plgpu, spread

    *sinks, out_ref = refs
    row, head, query = (jax.lax.axis_index(axis) for axis in ("row", "head", "query"))
    group, head_dim = out_ref.shape[1] // outs.shape[1], outs.shape[4]
    layout, (tall, _) = _layout(head_dim), _tile(head_dim)
    shape, of_slot = (tall, head_dim // 2), layout.reduce(1)
    slots = plgpu.broadcasted_iota(jnp.int32, (tall,), 0, layout=of_slot)

    def across(of_slots: Any) -> Any:
        return spread(of_slots, shape, 0, layout)

    def step(index: Any, state: Any) -> Any:
        high, total, *out = state
        place = row, head, pl.ds(index * tall, tall), query
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
