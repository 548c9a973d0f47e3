"""Attention of whole sequences with gradients, by the native kernel: no array of scores.

The forward pass keeps its output and the logarithms of the softmax's sums; the backward pass makes
the scores of one tile after the other anew. The reference is `xla.attention` and its derivative.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops.attention.args import AttentionArgs, Dense
from rooflax.ops.dispatch import Backend

LANES = 16
"""A head is a multiple of as many."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    sinks = jnp.zeros(0) if args.sinks is None else args.sinks
    segments = dense.segment_ids
    segments = jnp.zeros((0, 0), jnp.int32) if segments is None else segments
    where = dense.positions, dense.key_positions, dense.context_lens, segments
    settings = args.scale, args.window or 0, args.ahead
    values = (a.astype(jnp.float32) for a in (q, k, v, sinks))
    out: Any = _attention(settings, where, *values)
    return out.astype(q.dtype)


def _forward(settings: Any, where: Any, *values: Array) -> tuple[Array, Any]:
    q, k, v, sinks = values
    rows, queries, heads, _ = q.shape
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    sums = jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32)
    call = jax.ffi.ffi_call("rooflax_whole_attention", (like, sums))
    out, log_sums = call(q, k, v, *where, sinks, **_attributes(settings))
    return out, (where, values, out, log_sums)


def _backward(settings: Any, residuals: Any, d_out: Array) -> tuple[Any, ...]:
    where, (q, k, v, sinks), out, log_sums = residuals
    like = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v))
    call = jax.ffi.ffi_call("rooflax_whole_attention_gradients", like)
    gradients = call(q, k, v, *where, sinks, out, log_sums, d_out, **_attributes(settings))
    d_sinks = jnp.zeros(0)
    if sinks.shape[0]:
        shares = jnp.exp(sinks[None, :, None] - log_sums)  # B N T
        d_sinks = -jnp.einsum("bnt,btnh,btnh->n", shares, d_out, out)
    return None, *gradients, d_sinks


def _attributes(settings: tuple[float, int, int]) -> dict[str, Any]:
    scale, window, ahead = settings
    return {"scale": np.float32(scale), "window": np.int64(window), "ahead": np.int64(ahead)}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: tuple[float, int, int], where: Any, *values: Array) -> Array:
    return _forward(settings, where, *values)[0]


_attention.defvjp(_forward, _backward)


def unsupported(q: Array, k: Array, v: Array, dense: Dense, args: AttentionArgs) -> str | None:
    del k, v, dense
    if args.repeat_kv:
        return "attention's native kernel never copies K/V heads (gqa=repeat)"
    if args.pattern is not None or args.bias is not None or args.cap is not None:
        return "the native kernel of whole sequences has no patterns, biases and soft-caps"
    if q.shape[-1] % LANES:
        return f"the native kernel of whole sequences takes heads of a multiple of {LANES}"
    return None


BACKEND = Backend(attention, unsupported)
