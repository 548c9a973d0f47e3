"""Gathers blocks into contiguous keys, for every implementation that needs them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.args import Dense, Paging
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
