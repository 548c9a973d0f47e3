"""Gathers blocks into contiguous keys, for every implementation that needs them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.args import AttentionArgs, Dense, Paging
from rooflax.ops.kv_pool import Pool, PoolLeaf, as_pool


def gather(pool: PoolLeaf | Pool, block_tables: Int[Array, "B nb"]) -> Float[Array, "B K S H"]:
    """The rows' blocks, one after the other: S = nb * block_size."""
    blocks = as_pool(pool).blocks(block_tables)
    rows, nb, kv_heads, block_size, head_dim = blocks.shape
    return blocks.swapaxes(1, 2).reshape(rows, kv_heads, nb * block_size, head_dim)


def gathered(
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"], Dense]:
    """The rows' keys and values, and where they are."""
    k, v = gather(k_pool, paging.block_tables), gather(v_pool, paging.block_tables)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    key_positions = paging.first_positions[:, None] + slots[None, :]
    return k, v, Dense(paging.positions, key_positions, paging.context_lens)


def unsupported_by(kernel: str, k_pool: Pool, args: AttentionArgs) -> str | None:
    """Reason why a kernel that reads blocks where they lie does not run; None if it may.

    Args:
        kernel: its name in the reason.
    """
    if args.repeat_kv:
        return f"{kernel} never copies K/V heads (gqa=repeat)"
    if not args.causal:
        return f"{kernel} is causal"
    if args.cap is not None:
        return f"{kernel} does not cap scores"
    if k_pool.scales is not None and k_pool.values.dtype != jnp.int8:
        return f"{kernel} reads no fp8 KV cache"
    if k_pool.values.dtype == jnp.float16:
        return f"{kernel} reads no float16 KV cache"
    return None


def gathering(attention: Callable[..., Array]) -> Callable[..., Array]:
    """Paged attention by one over contiguous keys."""

    def paged_attention(
        q: Array, k_pool: Pool, v_pool: Pool, paging: Paging, args: AttentionArgs
    ) -> Array:
        return attention(q, *gathered(k_pool, v_pool, paging), args)

    return paged_attention
