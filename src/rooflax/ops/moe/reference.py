"""Experts, for reading: every expert on every token, weighted by its share or by zero."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def experts(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens chosen"],
    expert_weights: Float[Array, "tokens chosen"],
    gate_up: Float[Array, "experts hidden 2 mlp"],
    gate_up_bias: Float[Array, "experts 2 mlp"],
    down: Float[Array, "experts mlp hidden"],
    down_bias: Float[Array, "experts hidden"],
    *,
    activation: Callable[[jax.Array], jax.Array],
    method: str,
) -> Float[Array, "tokens hidden"]:
    del method  # it always runs every expert
    num_experts = gate_up.shape[0]
    x32, gate_up32, down32 = (a.astype(jnp.float32) for a in (x, gate_up, down))
    h = jnp.einsum("td,edcf->tecf", x32, gate_up32, precision=HIGHEST)
    h = activation(h + gate_up_bias.astype(jnp.float32)[None])
    y = jnp.einsum("tef,efd->ted", h, down32, precision=HIGHEST)
    y = y + down_bias.astype(jnp.float32)[None]
    chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.float32)
    shares = jnp.einsum("tj,tje->te", expert_weights, chosen, precision=HIGHEST)
    return jnp.einsum("te,ted->td", shares, y, precision=HIGHEST).astype(x.dtype)
