"""From blocks to contiguous keys: what every implementation that gathers shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.attention.plan import sees
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


def key_positions(first_positions: Int[Array, " B"], num_slots: int) -> Int[Array, "B num_slots"]:
    """Absolute position of every slot of the rows' tables."""
    return first_positions[:, None] + jnp.arange(num_slots, dtype=jnp.int32)[None, :]


def visible(
    positions: Int[Array, "B T"],
    keys: Int[Array, "B S"],
    context_lens: Int[Array, " B"],
    window: int | None,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None,
    pattern: Pattern | None = None,
) -> jax.Array:
    """[B, T, S] bool: which query sees which key; segments are the queries' and the keys'."""
    query, key = positions[:, :, None], keys[:, None, :]
    mask = sees(query, key, context_lens[:, None, None], window, pattern)
    if segment_ids is not None:
        mask &= segment_ids[0][:, :, None] == segment_ids[1][:, None, :]
    return mask
