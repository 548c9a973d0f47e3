"""Paged attention by the native kernel: blocks are read in place, cost follows the visible keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.attention.sequences import Sequences
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
    """Every row has as many queries, and their positions follow one another."""
    if repeat_kv:
        raise NotImplementedError("attention's native kernel never copies K/V heads (gqa=repeat).")
    if pattern is not None:
        raise NotImplementedError("attention's native kernel has no patterns.")
    rows, length = q.shape[:2]
    starts = jnp.arange(rows, dtype=jnp.int32) * length
    lens = jnp.full(rows, length, jnp.int32)
    where = (block_tables, first_positions, starts, lens, positions[:, 0], context_lens)
    flat = q.reshape(-1, *q.shape[2:])
    return _attend(flat, k_pool, v_pool, where, scale, window, sinks).reshape(q.shape)


def ragged_attention(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N H"]:
    s = sequences
    where = (
        s.block_tables, s.first_positions, s.query_starts, s.query_lens, s.positions, s.context_lens
    )  # fmt: skip
    return _attend(q, k_pool, v_pool, where, scale, window, sinks)


def _attend(
    q: jax.Array,
    k_pool: jax.Array | QuantizedPool,
    v_pool: jax.Array | QuantizedPool,
    where: tuple[jax.Array, ...],
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """The kernel's call."""
    scales = (jnp.zeros(0, jnp.float32),) * 2
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        scales = (k_pool.scales, v_pool.scales)
        k_pool, v_pool = k_pool.values, v_pool.values
    sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call("rooflax_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q.astype(jnp.float32),
        k_pool,
        v_pool,
        *scales,
        *where,
        sinks,
        scale=np.float32(scale),
        window=np.int64(window or 0),
    ).astype(q.dtype)
