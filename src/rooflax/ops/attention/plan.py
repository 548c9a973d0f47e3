"""Tiles of keys that a kernel visits, decided before it runs, so that its cost follows them.

What is seen inside a tile is `AttentionArgs.sees`. Neither knows of any kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from rooflax.ops.attention.args import AttentionArgs, Paging

NOWHERE = -1
"""The position of padded queries, which see nothing."""


class Visits(NamedTuple):
    """Tiles of keys that each tile of queries visits: `order[begin:end]`, ascending.

    Attributes:
        order: None where the tiles visited are `begin` to `end` themselves.
    """

    begins: Int[Array, "B tiles"]
    ends: Int[Array, "B tiles"]
    order: Int[Array, "B tiles num_tiles"] | None

    def listed(
        self, num_tiles: int
    ) -> tuple[Int[Array, "B tiles num_tiles"], Int[Array, "B tiles"]]:
        """Lists that begin with the tiles visited, and how many those are."""
        order = self.order
        if order is None:
            order = self.begins[:, :, None] + jnp.arange(num_tiles, dtype=jnp.int32)[None, None]
        return order, self.ends - self.begins


def visible_tiles(
    paging: Paging, args: AttentionArgs, *, queries: int, keys: int, num_tiles: int
) -> Visits:
    """A tile is visited if one of the queries may see one of its keys.

    Args:
        paging: its positions are `NOWHERE` for queries that are none.
        queries: per tile; all tiles are full.
        keys: per tile; the first begins at `first_positions`.
        num_tiles: of keys, at most.
    """
    window, pattern = args.window, args.pattern
    positions = paging.positions.reshape(paging.positions.shape[0], -1, queries)
    first, context = paging.first_positions[:, None], paging.context_lens[:, None]
    real = jnp.where(positions == NOWHERE, jnp.iinfo(jnp.int32).max, positions)
    nearest, farthest = jnp.min(real, axis=2), jnp.max(positions, axis=2)
    last = jnp.minimum(farthest + 1, context) - first
    ends = jnp.clip((last + (keys - 1)) // keys, 0, num_tiles)
    begins = jnp.zeros_like(ends)
    if window is not None:
        oldest = jnp.maximum(nearest - window + 1 - first, 0)
        begins = jnp.minimum(oldest // keys, ends)
    if pattern is None:
        return Visits(begins, ends, None)
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)[None, None]
    starts = first[:, :, None] + tiles * keys
    ranges = (nearest[:, :, None], farthest[:, :, None]), (starts, starts + (keys - 1))
    seen = (tiles >= begins[:, :, None]) & (tiles < ends[:, :, None]) & pattern.meets(*ranges)
    order = jnp.argsort(~seen, axis=2, stable=True).astype(jnp.int32)
    return Visits(jnp.zeros_like(ends), jnp.sum(seen, axis=2, dtype=jnp.int32), order)
