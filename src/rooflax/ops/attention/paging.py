"""From blocks to contiguous keys: what every implementation that gathers shares."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.args import Dense, Paging
from rooflax.ops.quantization import QuantizedPool


def gather(
    pool: Float[Array, "blocks K block_size H"] | QuantizedPool, block_tables: Int[Array, "B nb"]
) -> Float[Array, "B K S H"]:
    """The rows' blocks, one after the other: S = nb * block_size."""
    if isinstance(pool, QuantizedPool):
        values, scales = (
            a.at[block_tables].get(mode="promise_in_bounds") for a in (pool.values, pool.scales)
        )
        blocks = values.astype(jnp.float32) * scales[..., None]
    else:
        blocks = pool.at[block_tables].get(mode="promise_in_bounds")
    rows, nb, kv_heads, block_size, head_dim = blocks.shape
    return blocks.swapaxes(1, 2).reshape(rows, kv_heads, nb * block_size, head_dim)


def gathered(
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    paging: Paging,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"], Dense]:
    """The rows' keys and values, and where they are."""
    k, v = gather(k_pool, paging.block_tables), gather(v_pool, paging.block_tables)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    key_positions = paging.first_positions[:, None] + slots[None, :]
    return k, v, Dense(paging.positions, key_positions, paging.context_lens)
