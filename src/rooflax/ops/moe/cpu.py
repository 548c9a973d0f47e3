"""Experts by the native kernel: rows that share an expert run together, no other expert is read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.cpu import product
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm
from rooflax.ops.quantization import QuantizedArray
from rooflax.ops.real_rows import NumRows
from rooflax.ops.stacked import Stacked


def experts(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens chosen"],
    expert_weights: Float[Array, "tokens chosen"],
    gate_up: Float[Array, "experts hidden 2 mlp"] | QuantizedArray | Stacked,
    gate_up_bias: Float[Array, "experts 2 mlp"] | Stacked | None,
    down: Float[Array, "experts mlp hidden"] | QuantizedArray | Stacked,
    down_bias: Float[Array, "experts hidden"] | Stacked | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
    norm: Norm | None = None,
    method: str,
    num_tokens: NumRows = None,
) -> Float[Array, "tokens hidden"]:
    if method != "grouped":
        raise NotImplementedError(f"the experts' native kernel always groups (moe={method}).")
    tokens, chosen = expert_ids.shape
    pairs, select = jnp.repeat(x, chosen, axis=0), expert_ids.reshape(-1)
    if not isinstance(gate_up, QuantizedArray):
        gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
    bias = None if gate_up_bias is None else gate_up_bias.reshape(gate_up_bias.shape[0], -1)
    num_rows = None if num_tokens is None else num_tokens * chosen
    h = product(pairs, gate_up, bias, prologue=norm, select=select, num_rows=num_rows)
    prologue = activation if isinstance(activation, Activation | ClampedSwiglu) else None
    if prologue is None:
        h = activation(h.reshape(h.shape[0], 2, -1))
    y = product(h, down, down_bias, prologue=prologue, select=select, num_rows=num_rows)
    shared = y.reshape(tokens, chosen, -1) * expert_weights.astype(jnp.float32)[:, :, None]
    total = shared[:, 0]
    for index in range(1, chosen):  # one after the other: XLA's sums depend on the shape
        total = total + shared[:, index]
    return total.astype(x.dtype)
