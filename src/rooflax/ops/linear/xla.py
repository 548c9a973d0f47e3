"""Linear as one dot_general, left to XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dot import dot_general


def matmul(
    x: Float[Array, "rows in"], w: Float[Array, "in out"], bias: Float[Array, " out"] | None
) -> Float[Array, "rows out"]:
    y = dot_general(x, w, (((1,), (0,)), ((), ())))
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


def unembed(
    x: Float[Array, "rows hidden"], table: Float[Array, "vocab hidden"]
) -> Float[Array, "rows vocab"]:
    return dot_general(x, table, (((1,), (1,)), ((), ())))
