"""Experts in plain JAX: a loop over tiles of tokens that share an expert.

`lax.ragged_dot` would be the obvious tool, but on CPU it multiplies by every expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.control import fori_loop
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear import xla as linear
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.moe import reference
from rooflax.ops.moe.args import MoeArgs

LARGEST_TILE = 32


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    if args.method == "dense":
        return reference.experts(args)
    x, expert_ids = args.rows, args.expert_ids
    num_tokens, chosen = expert_ids.shape
    per_expert = _tile_size(num_tokens * chosen, args.num_experts)
    tile = 1 if args.method == "per_token" else per_expert
    tile_expert, pair_slot, num_tiles = plan(expert_ids.reshape(-1), args.num_experts, tile)
    outputs = _run_tiles(args, x, tile_expert, pair_slot, num_tiles, tile)
    per_pair = outputs[pair_slot].reshape(num_tokens, chosen, -1)
    return args.onto(jnp.sum(per_pair * args.expert_weights[:, :, None], axis=1).astype(x.dtype))


def _tile_size(num_pairs: int, num_experts: int) -> int:
    """A power of two near the tokens an expert can expect, so that few tiles stay part empty."""
    tile = 1
    while tile < LARGEST_TILE and tile * num_experts < num_pairs:
        tile *= 2
    return tile


def plan(
    pair_expert: Int[Array, " pairs"], num_experts: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts (token, expert) pairs into tiles of one expert each.

    Returns:
        tile_expert: [max_tiles], the expert of each tile.
        pair_slot: [pairs], where each pair lies: tile number * tile + place in the tile.
        num_tiles: how many tiles are in use.
    """
    num_pairs = pair_expert.shape[0]
    counts = jnp.zeros(num_experts, jnp.int32).at[pair_expert].add(1)
    tiles_of = (counts + (tile - 1)) // tile
    last_tile = jnp.cumsum(tiles_of)
    first_tile, first_pair = last_tile - tiles_of, jnp.cumsum(counts) - counts

    order = jnp.argsort(pair_expert, stable=True)
    rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    pair_slot = first_tile[pair_expert] * tile + rank - first_pair[pair_expert]

    max_tiles = min(num_pairs, num_pairs // tile + num_experts)
    index = jnp.arange(max_tiles, dtype=jnp.int32)
    tile_expert = jnp.minimum(
        jnp.searchsorted(last_tile, index, side="right").astype(jnp.int32), num_experts - 1
    )
    return tile_expert, pair_slot, last_tile[-1]


def _run_tiles(
    args: MoeArgs,
    x: jax.Array,
    tile_expert: jax.Array,
    pair_slot: jax.Array,
    num_tiles: jax.Array,
    tile: int,
) -> Float[Array, "slots hidden"]:
    """Every used tile through its expert, in float32; unused slots stay zero."""
    up, down = args.up.stack, args.down.stack
    biases = args.up.biases, args.down.biases
    num_slots, chosen = tile_expert.shape[0] * tile, args.expert_ids.shape[1]
    token_of_pair = jnp.arange(pair_slot.shape[0], dtype=jnp.int32) // chosen
    token_of_slot = jnp.zeros(num_slots, jnp.int32).at[pair_slot].set(token_of_pair)

    def run_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = tile_expert[index]
        tokens = jax.lax.dynamic_slice_in_dim(token_of_slot, index * tile, tile)
        w_in, w_out = up.member(expert), down.member(expert)
        b_in, b_out = (None if bias is None else bias[expert] for bias in biases)
        h = linear.matmul(LinearArgs(x[tokens], w_in, bias=b_in, dtype=x.dtype))
        h = args.activation(h.reshape(tile, 2, -1))
        y = linear.matmul(LinearArgs(h, w_out, bias=b_out, dtype=h.dtype))
        y = y.astype(jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y, index * tile, axis=0)

    empty = jnp.zeros((num_slots, x.shape[1]), jnp.float32)
    return fori_loop(0, num_tiles, run_tile, empty)


BACKEND = Backend(experts)
