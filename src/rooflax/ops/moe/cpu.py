"""Experts by the native kernel: rows that share an expert run together, no other expert is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import native
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.cpu import selected_matmul
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu
from rooflax.ops.moe.args import Experts, MoeArgs


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    tokens, chosen = args.expert_ids.shape
    pairs, select = jnp.repeat(args.x, chosen, axis=0), args.expert_ids.reshape(-1)
    num_rows = None if args.num_tokens is None else args.num_tokens * chosen

    def through(x: jax.Array, e: Experts, prologue: object) -> jax.Array:
        bias = None if e.bias is None else e.bias.reshape(args.num_experts, -1)
        return selected_matmul(
            LinearArgs(x, e.w, e.index, bias, prologue, num_rows=num_rows),  # type: ignore[arg-type]
            select,
        )

    h = through(pairs, args.up, args.norm)
    fused = isinstance(args.activation, Activation | ClampedSwiglu)
    if not fused:
        h = args.activation(h.reshape(h.shape[0], 2, -1))
    y = through(h, args.down, args.activation if fused else None)
    shared = y.reshape(tokens, chosen, -1) * args.expert_weights.astype(jnp.float32)[:, :, None]
    total = shared[:, 0]
    for index in range(1, chosen):  # one after the other: XLA's sums depend on the shape
        total = total + shared[:, index]
    return args.onto(total.astype(args.x.dtype))


def unsupported(args: MoeArgs) -> str | None:
    if args.method != "grouped":
        return f"the experts' native kernel always groups (moe={args.method})"
    return native.unreadable(args.up.w.code) or native.unreadable(args.down.w.code)


BACKEND = Backend(experts, unsupported)
