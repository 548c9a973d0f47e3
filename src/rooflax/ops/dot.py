"""One contraction for all operations: accumulates in float32, whatever the platform can do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
FLOAT32 = jax.lax.Precision.HIGHEST
"""Precision of float32 matmuls: full on every platform, as docs/optimizations.md measures."""


def dot_general(
    a: Float[Array, "*a"], b: Float[Array, "*b"], dimension_numbers: Dims
) -> Float[Array, "*result"]:
    """lax.dot_general with float32 sums and a float32 result; unlike operands meet in float32.

    float32 operands are multiplied as float32, not as TF32 or bfloat16. XLA's CPU backend has no
    bfloat16 matmul for every layout, so there narrower operands are upcast first.
    """
    dtype = a.dtype if a.dtype == b.dtype else jnp.dtype(jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    if dtype == jnp.float32:
        return jax.lax.dot_general(a, b, dimension_numbers, FLOAT32)

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, dimension_numbers, preferred_element_type=jnp.float32)

    def upcast(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), dimension_numbers)

    return jax.lax.platform_dependent(a, b, cpu=upcast, default=narrow)
