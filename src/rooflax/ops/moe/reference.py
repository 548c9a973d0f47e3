"""Experts, for reading: every expert on every token, weighted by its share or by zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import Stored, taken

HIGHEST = jax.lax.Precision.HIGHEST


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    x, up, down = args.rows, args.up.stack, args.down.stack
    gate_up_bias, down_bias = taken(args.up.bias), taken(args.down.bias)
    x32, gate_up32 = _operands(x.astype(jnp.float32), up)
    h = jnp.einsum("td,edcf->tecf", x32, gate_up32, precision=HIGHEST)
    h = args.activation(h + gate_up_bias.astype(jnp.float32)[None])
    h, down32 = _operands(h, down)
    y = jnp.einsum("tef,efd->ted", h, down32, precision=HIGHEST)
    y = y + down_bias.astype(jnp.float32)[None]
    chosen = jax.nn.one_hot(args.expert_ids, args.num_experts, dtype=jnp.float32)
    shares = jnp.einsum("tj,tje->te", args.expert_weights, chosen, precision=HIGHEST)
    return jnp.einsum("te,ted->td", shares, y, precision=HIGHEST).astype(x.dtype)


def _operands(x: jax.Array, w: Stored) -> tuple[jax.Array, jax.Array]:
    """Rows as the weights' format rounds them, and the weights, in float32."""
    rows = w.activations(x.reshape(-1, x.shape[-1]))
    return rows.reshape(x.shape), w.numbers().reshape(w.shape)


BACKEND = Backend(experts)
