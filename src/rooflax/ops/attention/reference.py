"""Attention, for reading: K and V copied to every query head, float32 throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.attention.args import AttentionArgs, Dense
from rooflax.ops.attention.paging import gathering
from rooflax.ops.dispatch import Backend

HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    """Attention in float32; repeats K/V heads and looks at every key."""
    group = q.shape[2] // k.shape[1]
    q32 = q.astype(jnp.float32)
    k32 = jnp.repeat(k.astype(jnp.float32), group, axis=1)
    v32 = jnp.repeat(v.astype(jnp.float32), group, axis=1)

    scores = args.scores(jnp.einsum("btnh,bnsh->bnts", q32, k32, precision=HIGHEST))
    if args.bias is not None:
        bias = args.biases(dense.positions[:, :, None], dense.key_positions[:, None])
        scores = scores + bias.swapaxes(0, 1)
    scores = jnp.where(dense.visible(args)[:, None], scores, -jnp.inf)

    sinks = jnp.full(q.shape[2], -jnp.inf) if args.sinks is None else args.sinks
    sink = sinks.astype(jnp.float32)[None, :, None, None]
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    weights = weights / jnp.where(total == 0, 1.0, total)

    out = jnp.einsum("bnts,bnsh->btnh", weights, v32, precision=HIGHEST)
    return out.astype(q.dtype)


DENSE = Backend(attention)
BACKEND = Backend(gathering(attention))
