"""Paged attention by the native kernel: blocks are read in place, cost follows the visible keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import Pool


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Pool,
    v_pool: Pool,
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
    k_pool: Pool,
    v_pool: Pool,
    sequences: Sequences,
    args: AttentionArgs,
) -> Float[Array, "T N H"]:
    none = jnp.zeros(0, jnp.float32)
    dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
    call = jax.ffi.ffi_call("rooflax_attention", jax.ShapeDtypeStruct(q.shape, dtype))
    return call(
        q.astype(dtype),
        k_pool.values,
        v_pool.values,
        *(none if pool.scales is None else pool.scales for pool in (k_pool, v_pool)),
        sequences.block_tables,
        sequences.first_positions,
        sequences.query_starts,
        sequences.query_lens,
        sequences.positions,
        sequences.context_lens,
        none if args.sinks is None else args.sinks.astype(jnp.float32),
        jnp.zeros((0, 1)) if args.bias is None else args.bias.astype(jnp.float32),
        scale=np.float32(args.scale),
        cap=np.float32(args.cap or 0.0),
        window=np.int64(args.window or 0),
        ahead=np.int64(args.ahead),
    ).astype(q.dtype)


def unsupported(
    q: object, k_pool: Pool, v_pool: Pool, where: object, args: AttentionArgs
) -> str | None:
    del q, k_pool, v_pool, where
    if args.repeat_kv:
        return "attention's native kernel never copies K/V heads (gqa=repeat)"
    if args.pattern is not None:
        return "attention's native kernel has no patterns"
    return None


BACKEND = Backend(paged_attention, unsupported, reads_blocks=True)
RAGGED = Backend(ragged_attention, unsupported, reads_blocks=True)
