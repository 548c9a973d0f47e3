"""Attention, for reading: K and V copied to every query head, float32 throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.attention import paging
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.quantization import QuantizedPool

HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None,
    sinks: Float[Array, " N"] | None,
    segment_ids: Int[Array, "B T"] | None,
    causal_order: bool,
    repeat_kv: bool,
    pattern: Pattern | None = None,
) -> Float[Array, "B T N H"]:
    del repeat_kv, causal_order  # it always repeats, and looks at every key
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    group = q.shape[2] // k.shape[1]
    q32 = q.astype(jnp.float32)
    k32 = jnp.repeat(k.astype(jnp.float32), group, axis=1)
    v32 = jnp.repeat(v.astype(jnp.float32), group, axis=1)

    scores = scale * jnp.einsum("btnh,bnsh->bnts", q32, k32, precision=HIGHEST)
    mask = paging.visible(positions, key_positions, context_lens, window, segments, pattern)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)

    no_sinks = jnp.full(q.shape[2], -jnp.inf)
    sink = (no_sinks if sinks is None else sinks.astype(jnp.float32))[None, :, None, None]
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    weights = weights / jnp.where(total == 0, 1.0, total)

    out = jnp.einsum("bnts,bnsh->btnh", weights, v32, precision=HIGHEST)
    return out.astype(q.dtype)


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
    k, v = paging.gather(k_pool, block_tables), paging.gather(v_pool, block_tables)
    return attention(
        q,
        k,
        v,
        positions=positions,
        key_positions=paging.key_positions(first_positions, k.shape[2]),
        context_lens=context_lens,
        scale=scale,
        window=window,
        sinks=sinks,
        segment_ids=None,
        causal_order=False,
        repeat_kv=repeat_kv,
        pattern=pattern,
    )
