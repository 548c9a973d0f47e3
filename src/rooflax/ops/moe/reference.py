"""Experts, for reading: every expert on every token, weighted by its share or by zero."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.quantization import QuantizedArray, dequantize, rounded

HIGHEST = jax.lax.Precision.HIGHEST


def experts(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens chosen"],
    expert_weights: Float[Array, "tokens chosen"],
    gate_up: Float[Array, "experts hidden 2 mlp"] | QuantizedArray,
    gate_up_bias: Float[Array, "experts 2 mlp"] | None,
    down: Float[Array, "experts mlp hidden"] | QuantizedArray,
    down_bias: Float[Array, "experts hidden"] | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
    method: str,
) -> Float[Array, "tokens hidden"]:
    del method  # it always runs every expert
    num_experts = gate_up.shape[0]
    x32, gate_up32 = _operands(x.astype(jnp.float32), gate_up)
    h = jnp.einsum("td,edcf->tecf", x32, gate_up32, precision=HIGHEST)
    if gate_up_bias is not None:
        h = h + gate_up_bias.astype(jnp.float32)[None]
    h = activation(h)
    h, down32 = _operands(h, down)
    y = jnp.einsum("tef,efd->ted", h, down32, precision=HIGHEST)
    if down_bias is not None:
        y = y + down_bias.astype(jnp.float32)[None]
    chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.float32)
    shares = jnp.einsum("tj,tje->te", expert_weights, chosen, precision=HIGHEST)
    return jnp.einsum("te,ted->td", shares, y, precision=HIGHEST).astype(x.dtype)


def _operands(x: jax.Array, w: jax.Array | QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Rows as the weights' format rounds them, and the weights, in float32."""
    if not isinstance(w, QuantizedArray):
        return x, w.astype(jnp.float32)
    rows = rounded(x.reshape(-1, x.shape[-1]), w.format)
    return rows.reshape(x.shape), dequantize(w).reshape(w.shape)
