"""RMSNorm and LayerNorm, in float32 whatever the input's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import parts


@parts.norms
def rms_norm(
    x: Float[Array, "*batch hidden"], weight: Float[Array, " hidden"], *, eps: float
) -> Float[Array, "*batch hidden"]:
    """x / sqrt(mean(x^2) + eps) * weight.

    Computed in float32, returned in x's dtype.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * _expand(weight, x.ndim)).astype(x.dtype)


@parts.norms
def layer_norm(
    x: Float[Array, "*batch hidden"],
    weight: Float[Array, " hidden"],
    bias: Float[Array, " hidden"],
    *,
    eps: float,
) -> Float[Array, "*batch hidden"]:
    """(x - mean) / sqrt(var + eps) * weight + bias, the variance being the biased one.

    Computed in float32, returned in x's dtype.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * scale * _expand(weight, x.ndim) + _expand(bias, x.ndim)).astype(x.dtype)


def _expand(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + vector.shape)
