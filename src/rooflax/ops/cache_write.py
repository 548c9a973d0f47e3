"""Writing keys or values into their slots of a pool of blocks, in place where it is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.dispatch import choose
from rooflax.ops.quantization import QuantizedPool, tokens_as_fp8, tokens_as_int8

Pool = Float[Array, "blocks kv_heads block_size head_dim"] | QuantizedPool


@parts.cache_writes
def cache_write(
    pool: Pool,
    new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> Pool:
    """The pool with new keys (or values) in its type: a slot is block * block_size + offset.

    A slot of NO_SLOT or more is not written; those in it differ.

    Args:
        implementation: None for the platform's best.
    """
    return choose("cache_write", IMPLEMENTATIONS, implementation)(pool, new, slots)


def _scatter(pool: Pool, new: jax.Array, slots: jax.Array) -> Pool:
    # Unsigned: a signed index is first looked at for a sign, in a dozen operations per layer.
    slots, block_size = slots.astype(jnp.uint32), pool.shape[2]
    block, offset = slots // block_size, slots % block_size
    if isinstance(pool, QuantizedPool):
        as_codes = tokens_as_int8 if pool.values.dtype == jnp.int8 else tokens_as_fp8
        values, scales = as_codes(new)
        return QuantizedPool(
            pool.values.at[block, :, offset].set(values, mode="drop"),
            pool.scales.at[block, :, offset].set(scales, mode="drop"),
        )
    return pool.at[block, :, offset].set(new.astype(pool.dtype), mode="drop")


def _native(pool: Pool, new: jax.Array, slots: jax.Array) -> Pool:
    """XLA widens a whole pool of bfloat16 for every scatter on a CPU, and narrows it again."""
    if isinstance(pool, QuantizedPool):
        return _scatter(pool, new, slots)
    out = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("rooflax_cache_write", out, input_output_aliases={0: 0})
    return call(pool, new.astype(jnp.float32), slots.astype(jnp.int32))


IMPLEMENTATIONS = {"reference": _scatter, "xla": _scatter, "native": _native}
