"""Paged attention by the native kernel: blocks are read in place, cost follows the visible keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.quantization import QuantizedPool


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    paging: Paging,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    """Every row has as many queries, and their positions follow one another."""
    rows, length = q.shape[:2]
    sequences = Sequences(
        query_starts=jnp.arange(rows, dtype=jnp.int32) * length,
        query_lens=jnp.full(rows, length, jnp.int32),
        positions=paging.positions[:, 0],
        context_lens=paging.context_lens,
        block_tables=paging.block_tables,
        first_positions=paging.first_positions,
        longest=length,
    )
    flat = q.reshape(-1, *q.shape[2:])
    return ragged_attention(flat, k_pool, v_pool, sequences, args).reshape(q.shape)


def ragged_attention(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    sequences: Sequences,
    args: AttentionArgs,
) -> Float[Array, "T N H"]:
    if args.repeat_kv:
        raise NotImplementedError("attention's native kernel never copies K/V heads (gqa=repeat).")
    if args.pattern is not None:
        raise NotImplementedError("attention's native kernel has no patterns.")
    scales = (jnp.zeros(0, jnp.float32),) * 2
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        scales = (k_pool.scales, v_pool.scales)
        k_pool, v_pool = k_pool.values, v_pool.values
    call = jax.ffi.ffi_call("rooflax_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q.astype(jnp.float32),
        k_pool,
        v_pool,
        *scales,
        sequences.block_tables,
        sequences.first_positions,
        sequences.query_starts,
        sequences.query_lens,
        sequences.positions,
        sequences.context_lens,
        jnp.zeros(0, jnp.float32) if args.sinks is None else args.sinks.astype(jnp.float32),
        scale=np.float32(args.scale),
        window=np.int64(args.window or 0),
    ).astype(q.dtype)
