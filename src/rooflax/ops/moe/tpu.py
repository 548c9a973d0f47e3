"""Experts on TPU: tokens sorted by expert, and one kernel for all tiles that share one each.

The kernel is linear's: which expert a tile of rows has is known before its weights are fetched, so
that no other expert is read (as in megablox, whose groups need not be aligned). A tile of tokens
has at least the rows that a TPU's tile has, for which decoding pays nothing: it waits for weights.

Interpreted it equals its reference, and Mosaic accepts it; no TPU has run it (see ops.tpu).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import tpu
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear.tpu import DECODED, stack_of, tiled_matmul
from rooflax.ops.moe.args import Experts, MoeArgs
from rooflax.ops.moe.xla import plan


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    (tokens, chosen), num_experts = args.expert_ids.shape, args.num_experts
    tile = tpu.tokens_per_tile(tokens * chosen, num_experts)
    tile_expert, pair_slot, num_tiles = plan(args.expert_ids.reshape(-1), num_experts, tile)
    token_of_pair = jnp.arange(tokens * chosen, dtype=jnp.int32) // chosen
    num_slots = tile_expert.shape[0] * tile
    token_of_slot = jnp.zeros(num_slots, jnp.int32).at[pair_slot].set(token_of_pair)
    expert_of_slot = jnp.repeat(tile_expert, tile)

    def expert_matmul(rows: jax.Array, e: Experts) -> jax.Array:
        w, layer = stack_of(e.w, e.index)
        members = layer * num_experts + tile_expert
        y = tiled_matmul(rows, w, members, num_tiles=num_tiles, tile=tile)
        if e.biases is None:
            return y
        return y + e.biases.astype(jnp.float32)[expert_of_slot]

    x = args.rows
    h = expert_matmul(x[token_of_slot], args.up).astype(x.dtype)
    h = args.activation(h.reshape(num_slots, 2, -1))
    y = expert_matmul(h, args.down)
    pairs = y[pair_slot].reshape(tokens, chosen, -1)
    return args.onto(jnp.sum(pairs * args.expert_weights[:, :, None], axis=1).astype(x.dtype))


def unsupported(args: MoeArgs) -> str | None:
    if args.method != "grouped":
        return f"the experts' TPU kernel always groups (moe={args.method})"
    strange = {args.up.w.code, args.down.w.code} - {"matrix", *DECODED}
    return f"the experts' TPU kernel has no {min(strange)} weights" if strange else None


BACKEND = Backend(experts, unsupported)
