"""Attention of a list of tokens: sequences of different numbers of queries, one after the other.

A kernel that takes the list computes no padding. The others get it as tiles: up to `TILE` queries
of one sequence, with that sequence's block table, so that what they pad is less than a tile a
sequence and blocks that no query of a tile sees are not visited.

Source: Ragged Paged Attention, as in vLLM and tpu-inference.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.attention import cpu
from rooflax.ops.attention.api import PAGED, check_heads, trimmed, with_pool_width
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.plan import NOWHERE
from rooflax.ops.attention.sequences import Sequences, owners
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.kv_pool import Pool, PoolLeaf, as_pool

TILE = 64
"""Queries of a tile: as many as a GPU's tensor cores multiply at a time."""


@parts.attention
def ragged_attention(
    q: Float[Array, "T N H"],
    k_pool: PoolLeaf,
    v_pool: PoolLeaf,
    sequences: Sequences,
    args: AttentionArgs,
    *,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """`paged_attention` of a list of tokens.

    Args:
        q: queries; what comes back for tokens of no sequence means nothing.
        implementation: as for `paged_attention`.

    Raises:
        ValueError: N is not a multiple of K.
        RequestError: the named implementation is not here, or does not take these arguments.
    """
    check_heads(q.shape[1], k_pool.shape[1])
    return RAGGED(implementation, q, as_pool(k_pool), as_pool(v_pool), sequences, args)


def _in_tiles(name: str) -> Backend:
    """The paged backend of this name, of tiles."""

    def run(q: Array, k: Pool, v: Pool, sequences: Sequences, args: AttentionArgs) -> Array:
        head_dim = q.shape[2]
        q = with_pool_width(q, k.values)
        tiles, of_token = _tiled(sequences, q.shape[0])
        paging = Paging(
            block_tables=sequences.block_tables[tiles.sequence],
            first_positions=sequences.first_positions[tiles.sequence],
            positions=tiles.positions,
            context_lens=sequences.context_lens[tiles.sequence],
        )
        out = PAGED.backend(name).run(q[tiles.tokens], k, v, paging, args)
        out = trimmed(out, head_dim)
        return out.reshape(-1, *out.shape[2:])[of_token]

    def unsupported(
        q: Array, k: Pool, v: Pool, sequences: Sequences, args: AttentionArgs
    ) -> str | None:
        shape = (*_tile_sizes(sequences, q.shape[0]), *q.shape[1:])
        tiles = jax.ShapeDtypeStruct(shape, q.dtype)
        return PAGED.backend(name).unsupported(tiles, k, v, sequences, args)

    return Backend(run, unsupported)


RAGGED = Operation(
    "attention",
    {
        "reference": _in_tiles("reference"),
        "xla": _in_tiles("xla"),
        "native": cpu.RAGGED,
        "pallas": _in_tiles("pallas"),
    },
)


@dataclass(frozen=True)
class _Tiles:
    """Attributes:
    sequence: of each tile.
    tokens: of each of its places, in the list; some token where there is none.
    positions: of those tokens; NOWHERE where there is none.
    """

    sequence: Int[Array, " tiles"]
    tokens: Int[Array, "tiles tile"]
    positions: Int[Array, "tiles tile"]


def _tile_sizes(s: Sequences, num_tokens: int) -> tuple[int, int]:
    """Largest number of tiles, and queries per tile."""
    num_sequences, tile = s.query_lens.shape[0], min(s.longest, TILE)
    if s.longest <= tile:
        return num_sequences, tile
    most = min(num_sequences * -(-s.longest // tile), num_sequences + num_tokens // tile)
    return most, tile


def _tiled(s: Sequences, num_tokens: int) -> tuple[_Tiles, Int[Array, " T"]]:
    """The tiles, and where each token is in them."""
    num_tiles, tile = _tile_sizes(s, num_tokens)
    num_sequences = s.query_lens.shape[0]
    needed = (s.query_lens + (tile - 1)) // tile
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    numbers = jnp.arange(num_tiles, dtype=jnp.int32)
    sequence = jnp.sum(numbers[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, num_sequences - 1)  # unused tiles
    first_tile = ends - needed
    inside = (numbers - first_tile[sequence])[:, None] * tile
    inside = inside + jnp.arange(tile, dtype=jnp.int32)[None, :]
    is_real = (inside >= 0) & (inside < s.query_lens[sequence][:, None])
    tokens = jnp.clip(s.query_starts[sequence][:, None] + inside, 0, num_tokens - 1)
    positions = jnp.where(is_real, s.positions[sequence][:, None] + inside, NOWHERE)
    owner, offset = owners(s.query_starts, s.query_lens, num_tokens)
    place = (first_tile[owner] + offset // tile) * tile + offset % tile
    return _Tiles(sequence, tokens, positions), jnp.clip(place, 0, num_tiles * tile - 1)
