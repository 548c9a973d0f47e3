"""Writing keys or values into their slots of a pool of blocks, in place where it is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.kv_pool import PoolLeaf, as_pool


@parts.cache_writes
def cache_write(
    pool: PoolLeaf,
    new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> PoolLeaf:
    """The pool with new keys (or values) in its type: a slot is block * block_size + offset.

    A slot of NO_SLOT or more is not written; those in it differ.

    Args:
        implementation: None for the platform's best.
    """
    return CACHE_WRITE(implementation, pool, new, slots)


def _scatter(pool: PoolLeaf, new: jax.Array, slots: jax.Array) -> PoolLeaf:
    # Unsigned: a signed index is first looked at for a sign, in a dozen operations per layer.
    slots, block_size = slots.astype(jnp.uint32), pool.shape[2]
    return as_pool(pool).written(slots // block_size, slots % block_size, new)


def _native(pool: PoolLeaf, new: jax.Array, slots: jax.Array) -> PoolLeaf:
    """XLA widens a whole pool of bfloat16 for every scatter on a CPU, and narrows it again."""
    values = as_pool(pool).values
    if as_pool(pool).scales is not None:
        return _scatter(pool, new, slots)
    out = jax.ShapeDtypeStruct(values.shape, values.dtype)
    call = jax.ffi.ffi_call("rooflax_cache_write", out, input_output_aliases={0: 0})
    return call(values, new.astype(jnp.float32), slots.astype(jnp.int32))


CACHE_WRITE = Operation(
    "cache_write",
    {"reference": Backend(_scatter), "xla": Backend(_scatter), "native": Backend(_native)},
)
