"""RMSNorm and LayerNorm, in float32 whatever the input's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.ops import parts
from rooflax.ops.dispatch import Backend, Operation


@parts.norms
def norm(
    x: Float[Array, "*batch hidden"],
    weight: Float[Array, " hidden"],
    bias: Float[Array, " hidden"] | None = None,
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "*batch hidden"]:
    """`rms_norm`, or with a bias `layer_norm`, where it stands alone and not before a matmul.

    Numerics: float32, returned in x's dtype. The native kernel sums a row in one order, whatever
    the number of rows.

    Args:
        implementation: None for the platform's best.
    """
    return NORM(implementation, x, weight, bias, eps)


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


def _plain(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    if bias is None:
        return rms_norm(x, weight, eps=eps)
    return layer_norm(x, weight, bias, eps=eps)


def _native(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    call = jax.ffi.ffi_call("rooflax_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    bias = jnp.zeros(0) if bias is None else bias
    x32, weight, bias = (a.astype(jnp.float32) for a in (x, weight, bias))
    return call(x32, weight, bias, eps=np.float32(eps)).astype(x.dtype)


NORM = Operation(
    "norm", {"reference": Backend(_plain), "xla": Backend(_plain), "native": Backend(_native)}
)
