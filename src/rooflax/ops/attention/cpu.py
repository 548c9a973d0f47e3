"""Paged attention by the native kernel: blocks are read in place, cost follows the visible keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.quantization import QuantizedPool


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    *,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B T"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None,
    sinks: Float[Array, " N"] | None,
    repeat_kv: bool,
    pattern: Pattern | None = None,
) -> Float[Array, "B T N H"]:
    if repeat_kv:
        raise NotImplementedError("attention's native kernel never copies K/V heads (gqa=repeat).")
    if pattern is not None:
        raise NotImplementedError("attention's native kernel has no patterns.")
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = jax.ffi.ffi_call("rooflax_attention", out)
    wide = q.astype(jnp.float32)
    scales = (jnp.zeros(0, jnp.float32),) * 2
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        scales = (k_pool.scales, v_pool.scales)
        k_pool, v_pool = k_pool.values, v_pool.values
    arrays = (block_tables, first_positions, positions, context_lens, sinks)
    return call(
        wide,
        k_pool,
        v_pool,
        *scales,
        *arrays,
        scale=np.float32(scale),
        window=np.int64(window or 0),
    ).astype(q.dtype)
