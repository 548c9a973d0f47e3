"""Linear, for reading: everything in float32, a sum of products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.quantization import QuantizedArray, quantized_product

HIGHEST = jax.lax.Precision.HIGHEST


def matmul(
    x: Float[Array, "rows in"],
    w: Float[Array, "in out"] | QuantizedArray,
    bias: Float[Array, " out"] | None,
) -> Float[Array, "rows out"]:
    x32 = x.astype(jnp.float32)
    if isinstance(w, QuantizedArray):
        y = quantized_product(x32, w)
    else:
        y = jnp.einsum("mk,kn->mn", x32, w.astype(jnp.float32), precision=HIGHEST)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


def unembed(
    x: Float[Array, "rows hidden"], table: Float[Array, "vocab hidden"] | QuantizedArray
) -> Float[Array, "rows vocab"]:
    if isinstance(table, QuantizedArray):
        return quantized_product(x.astype(jnp.float32), table)
    x32, table32 = x.astype(jnp.float32), table.astype(jnp.float32)
    return jnp.einsum("mk,nk->mn", x32, table32, precision=HIGHEST)
