"""Linear as one dot_general, left to XLA; a quantised weight is dequantised first."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.dot import dot_general
from rooflax.ops.quantization import QuantizedArray, quantized_product


def matmul(
    x: Float[Array, "rows in"],
    w: Float[Array, "in out"] | QuantizedArray,
    bias: Float[Array, " out"] | None,
) -> Float[Array, "rows out"]:
    if isinstance(w, QuantizedArray):
        y = quantized_product(x.astype(jnp.float32), w)
    else:
        y = dot_general(x, w, (((1,), (0,)), ((), ())))
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    return y.astype(x.dtype)


def unembed(
    x: Float[Array, "rows hidden"], table: Float[Array, "vocab hidden"] | QuantizedArray
) -> Float[Array, "rows vocab"]:
    if isinstance(table, QuantizedArray):
        return quantized_product(x.astype(jnp.float32), table)
    return dot_general(x, table, (((1,), (1,)), ((), ())))


def rows(
    table: Float[Array, "vocab hidden"], index: Int[Array, " n"], num_rows: object = None
) -> Float[Array, "n hidden"]:
    del num_rows  # padding is looked up like the rest
    return table.at[index].get(mode="clip")
