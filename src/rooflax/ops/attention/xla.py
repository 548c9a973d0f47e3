"""Attention in plain JAX: K and V are never copied to the query heads, scores are materialised.

The paged form gathers the rows' blocks first, which reads K and V about three times.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rooflax.ops import accelerator
from rooflax.ops.attention.args import AttentionArgs, Dense
from rooflax.ops.attention.paging import gathering
from rooflax.ops.dispatch import Backend
from rooflax.ops.dot import dot_general

QUERY_CHUNK = 128
"""Queries scored at once over whole sequences; keys behind a chunk's end are never touched."""

FEW_QUERIES = 8
"""Up to so many, the keys are the first operand of the scores on a CPU."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    if args.repeat_kv:
        group = q.shape[2] // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    k, v, sinks = k.astype(q.dtype), v.astype(q.dtype), _per_group(args.sinks, k.shape[1])

    def rows_of(first: int, end: int, num_keys: int) -> jax.Array:
        queries, keys = slice(first, end), slice(num_keys)
        mask, bias = dense.visible(args, queries, keys), None
        if args.bias is not None:
            query, key = dense.positions[:, queries, None], dense.key_positions[:, None, keys]
            bias = args.biases(query, key)
        parts = q[:, queries], k[:, :, keys], v[:, :, keys]
        return _attend(*parts, mask, bias, sinks, args)

    seq, num_keys = q.shape[1], k.shape[2]
    if not dense.causal_order or not args.causal:
        return rows_of(0, seq, num_keys)
    chunks = [(first, min(first + QUERY_CHUNK, seq)) for first in range(0, seq, QUERY_CHUNK)]
    return jnp.concatenate([rows_of(first, end, end) for first, end in chunks], axis=1)


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    bias: Float[Array, "N B T S"] | None,
    sinks: Float[Array, "1 K 1 G 1"] | None,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    rows, seq, num_heads, head_dim = q.shape
    grouped = q.reshape(rows, seq, k.shape[1], num_heads // k.shape[1], head_dim)
    scores = args.scores(_scores(grouped, k))
    if bias is not None:
        bias = bias.reshape(*grouped.shape[2:4], *bias.shape[1:])  # K G B T S
        scores = scores + bias.transpose(2, 0, 3, 1, 4)
    weights = _softmax(scores, mask[:, None, :, None], sinks).astype(q.dtype)
    out = dot_general(weights, v, (((4,), (2,)), ((0, 1), (0, 1))))  # B K T G H
    return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)


def _scores(q: Float[Array, "B T K G H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K T G S"]:
    """Scores; with few queries as the first operand, XLA's CPU backend takes up to four times as
    long (docs/optimizations.md).
    """
    if q.shape[1] <= FEW_QUERIES and accelerator.platform() == "cpu":
        return dot_general(k, q, (((3,), (4,)), ((0, 1), (0, 2)))).transpose(0, 1, 3, 4, 2)
    return dot_general(q, k, (((4,), (3,)), ((0, 2), (0, 1))))


def _per_group(sinks: jax.Array | None, kv_heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    return sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1, 1)


def _softmax(scores: jax.Array, mask: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Softmax over the visible keys and the sink; all zeros where nothing is visible."""
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask, scores, lowest)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks)
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(highest)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - jax.lax.stop_gradient(highest))
    return weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


DENSE = Backend(attention)
BACKEND = Backend(gathering(attention))
