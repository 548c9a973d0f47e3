"""Experts, for reading: every expert on every token, weighted by its share or by zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import StoredOperand, taken

HIGHEST = jax.lax.Precision.HIGHEST


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    x, up, down = args.rows, args.up.stack, args.down.stack
    x32, gate_up32 = _operands(x.astype(jnp.float32), up)
    h = jnp.einsum("td,edcf->tecf", x32, gate_up32, precision=HIGHEST)
    if args.up.bias is not None:
        h = h + taken(args.up.bias).astype(jnp.float32)[None]
    h = args.activation(h)
    h, down32 = _operands(h, down)
    y = jnp.einsum("tef,efd->ted", h, down32, precision=HIGHEST)
    if args.down.bias is not None:
        y = y + taken(args.down.bias).astype(jnp.float32)[None]
    chosen = jax.nn.one_hot(args.expert_ids, args.num_experts, dtype=jnp.float32)
    shares = jnp.einsum("tj,tje->te", args.expert_weights, chosen, precision=HIGHEST)
    return args.onto(jnp.einsum("te,ted->td", shares, y, precision=HIGHEST).astype(x.dtype))


def _operands(x: jax.Array, w: StoredOperand) -> tuple[jax.Array, jax.Array]:
    """Rows as the weights' format rounds them, and the weights, in float32."""
    rows = w.activations(x.reshape(-1, x.shape[-1]))
    return rows.reshape(x.shape), w.numbers().reshape(w.shape)


BACKEND = Backend(experts)
