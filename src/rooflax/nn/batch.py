"""`Batch`: everything one step needs to know about its tokens, as fixed-shape arrays.

It says which tokens, at which positions, and where their K and V live. It knows nothing of
requests, text or weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NO_SLOT = 1 << 30
"""Beyond every pool, wherever a layer's blocks begin in it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One step's tokens: `rows` sequences, each with up to `seq` new tokens, padded at the end.

    Attributes:
        tokens: token ids; padding may hold any valid id.
        positions: absolute position of each token in its sequence.
        query_lens: how many of a row's tokens are real; 0 for an empty row.
        context_lens: tokens visible to the row after this step, the new ones included.
        block_tables: per layer group, the row's blocks in order; 0 (scratch) where there is none.
            Empty without a cache.
        first_positions: per layer group, the position of the first slot of the row's table
            (above 0 only where a window has let go of older blocks).
        segment_ids: documents packed into one row; a token sees only its own. None: one document.
        split: axes of a mesh over which this is a part: "data" has other rows, "sequence" other
            tokens of the same rows. `block_tables` and `context_lens` are of whole rows always.
        hidden: what enters the layers in place of the tokens' embedding, where the layers before
            ran by themselves. None is the embedding.
    """

    tokens: Int[Array, "rows seq"]
    positions: Int[Array, "rows seq"]
    query_lens: Int[Array, " rows"]
    context_lens: Int[Array, " rows"]
    block_tables: tuple[Int[Array, "rows _"], ...] = ()
    first_positions: tuple[Int[Array, " rows"], ...] = ()
    segment_ids: Int[Array, "rows seq"] | None = None
    split: tuple[str, ...] = field(default=(), metadata={"static": True})
    hidden: Float[Array, "rows seq hidden"] | None = None

    @staticmethod
    def dense(
        tokens: Int[Array, "rows seq"],
        *,
        lengths: Int[Array, " rows"] | None = None,
        positions: Int[Array, "rows seq"] | None = None,
        segment_ids: Int[Array, "rows seq"] | None = None,
        hidden: Float[Array, "rows seq hidden"] | None = None,
    ) -> Batch:
        """Whole sequences from position 0, without a cache (training, scoring, no-cache runs)."""
        rows, seq = tokens.shape
        if lengths is None:
            lengths = jnp.full((rows,), seq, jnp.int32)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (rows, seq))
        return Batch(tokens, positions, lengths, lengths, segment_ids=segment_ids, hidden=hidden)

    @property
    def valid(self) -> jax.Array:
        """[rows, seq] bool: which tokens are real."""
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return index[None, :] < self.query_lens[:, None]

    def slot_mapping(self, group: int, block_size: int) -> jax.Array:
        """Where each token's K and V go in the pool of a layer group.

        slot = block_table[(position - first_position) // block_size] * block_size
               + position % block_size; padding has no slot (NO_SLOT) and is not written.

        Returns:
            [rows, seq] int32 slots; a slot is block * block_size + offset.
        """
        table = self.block_tables[group]
        # Unsigned: a signed division is a dozen operations. Padding may be below the first.
        relative = (self.positions - self.first_positions[group][:, None]).astype(jnp.uint32)
        index = jnp.minimum(relative // block_size, table.shape[1] - 1)
        block = jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")
        slot = block * block_size + (relative % block_size).astype(jnp.int32)
        return jnp.where(self.valid, slot, NO_SLOT)
