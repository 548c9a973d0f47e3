"""Activation functions, in the spellings that Hugging Face configs use."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def gated(name: str, gate_up: Float[Array, "*batch 2 mlp"]) -> Float[Array, "*batch mlp"]:
    """activation(gate) * up, as in SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020)."""
    return ACTIVATIONS[name](gate_up[..., 0, :]) * gate_up[..., 1, :]


def clamped_swiglu(
    gate_up: Float[Array, "*batch 2 mlp"], *, alpha: float = 1.702, limit: float = 7.0
) -> Float[Array, "*batch mlp"]:
    """GPT-OSS's gate: (up + 1) * gate * sigmoid(alpha * gate).

    The gate is clamped from above to `limit`, up to [-limit, limit].

    Source: openai/gpt-oss, gpt_oss/torch/model.py (swiglu).
    """
    gate = jnp.minimum(gate_up[..., 0, :], limit)
    up = jnp.clip(gate_up[..., 1, :], -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
