"""Activation functions, in the spellings that Hugging Face configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[jax.Array], jax.Array]

WHOLE_ROW = 64
"""Numbers of a row, and multiples, of which none are the end of XLA's vector loops."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(name: str, gate_up: Float[Array, "*batch 2 mlp"]) -> Float[Array, "*batch mlp"]:
    """activation(gate) * up, as in SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020).

    Its gradient keeps gate and up alone.
    """
    return ACTIVATIONS[name](gate_up[..., 0, :]) * gate_up[..., 1, :]


def _gated_forward(name: str, gate_up: Array) -> tuple[Array, Array]:
    return gated(name, gate_up), gate_up


def _gated_backward(name: str, gate_up: Array, dy: Array) -> tuple[Array]:
    gate, up = (gate_up[..., part, :].astype(jnp.float32) for part in (0, 1))
    dy = dy.astype(jnp.float32)
    if ACTIVATIONS[name] is jax.nn.silu:
        # by tanh: XLA would keep a sigmoid that the forward pass has as well
        share = 0.5 * jnp.tanh(0.5 * gate) + 0.5
        silu, slope = gate * share, share * (1 + gate * (1 - share))
    else:
        silu, pull = jax.vjp(ACTIVATIONS[name], gate)
        (slope,) = pull(jnp.ones_like(gate))
    return (jnp.stack([dy * up * slope, dy * silu], axis=-2).astype(gate_up.dtype),)


gated.defvjp(_gated_forward, _gated_backward)


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


def capped(x: Float[Array, "*batch width"], cap: float) -> Float[Array, "*batch width"]:
    """cap * tanh(x / cap).

    A row is the same bits among any number of rows: XLA on CPU computes tanh of an array's last
    few numbers otherwise than of the rest, so rows are filled up.

    Source: Gemma Team, Gemma 2, 2024.
    """
    width = x.shape[-1]
    full = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % WHOLE_ROW)])
    return cap * jnp.tanh(full / cap)[..., :width]
