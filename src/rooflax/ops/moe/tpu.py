"""Experts on TPU: tokens sorted by expert, and one kernel for all tiles that share one each.

The kernel is linear's: which expert a tile of rows has is known before its weights are fetched, so
that no other expert is read (as in megablox, whose groups need not be aligned). A tile of tokens
has at least the rows that a TPU's tile has, for which decoding pays nothing: it waits for weights.

Interpreted it equals its reference, and Mosaic accepts it; no TPU has run it (see ops.tpu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import tpu
from rooflax.ops.linear.prologue import Norm
from rooflax.ops.linear.tpu import product
from rooflax.ops.moe.xla import plan
from rooflax.ops.quantization import QuantizedArray
from rooflax.ops.stacked import Stacked, taken


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
    num_tokens: Any = None,
) -> Float[Array, "tokens hidden"]:
    del num_tokens  # padding is computed like the rest
    if method != "grouped":
        raise NotImplementedError(f"the experts' TPU kernel always groups (moe={method}).")
    (tokens, chosen), num_experts = expert_ids.shape, gate_up.shape[0]
    tile = tpu.tokens_per_tile(tokens * chosen, num_experts)
    tile_expert, pair_slot, num_tiles = plan(expert_ids.reshape(-1), num_experts, tile)
    token_of_pair = jnp.arange(tokens * chosen, dtype=jnp.int32) // chosen
    num_slots = tile_expert.shape[0] * tile
    token_of_slot = jnp.zeros(num_slots, jnp.int32).at[pair_slot].set(token_of_pair)
    expert_of_slot = jnp.repeat(tile_expert, tile)

    def products(rows: jax.Array, w: Any, bias: Any) -> jax.Array:
        members = tile_expert
        if isinstance(w, Stacked) and isinstance(w.stack, QuantizedArray) and w.stack.is_matrix:
            w, members = w.stack, w.index * num_experts + tile_expert
        w = taken(w)
        if not isinstance(w, QuantizedArray):
            w = w.reshape(num_experts, w.shape[1], -1)
        y = product(rows, w, members, num_tiles=num_tiles, tile=tile)
        if bias is None:
            return y
        return y + taken(bias).reshape(num_experts, -1).astype(jnp.float32)[expert_of_slot]

    x = x if norm is None else norm(x)
    h = products(x[token_of_slot], gate_up, gate_up_bias).astype(x.dtype)
    h = activation(h.reshape(num_slots, 2, -1))
    y = products(h, down, down_bias)
    pairs = y[pair_slot].reshape(tokens, chosen, -1)
    return jnp.sum(pairs * expert_weights[:, :, None], axis=1).astype(x.dtype)
