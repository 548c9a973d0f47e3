"""`Batch`: everything one step needs to know about its tokens, as fixed-shape arrays.

It says which tokens, at which positions, and where their K and V live. It knows nothing of
requests, text or weights.

With a cache a step is a list of tokens, [1, tokens]: those of all sequences, one after the other,
decode rows and prompt chunks alike; so are whole sequences of a model that attends both ways, which
keeps no cache. Otherwise (training, scoring, runs without a cache) it is a rectangle of whole
sequences, [rows, tokens].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.nn.layout import ceil_div
from rooflax.ops.attention import Sequences
from rooflax.ops.attention.sequences import owners
from rooflax.ops.recurrent import NO_ROW, Runs

NO_SLOT = 1 << 30
"""Slot of padding: beyond every pool, wherever a layer's blocks begin in it (csrc/ffi_common.h)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One step's tokens.

    Attributes:
        tokens: token ids; padding may hold any valid id.
        positions: absolute position of each token in its sequence.
        query_lens: per sequence, how many of the tokens are its own; 0 for none.
        context_lens: tokens visible to the sequence after this step, the new ones included.
        query_starts: where a sequence's tokens begin in the list; None for a rectangle, where row
            r's tokens are those of sequence r.
        query_positions: of a sequence's first token in the list.
        block_tables: per layer group, a sequence's blocks in order; 0 (scratch) where there is
            none. Empty without a cache.
        first_positions: per layer group, the position of the first slot of a sequence's table
            (above 0 only where out-of-window blocks were freed).
        longest: of a list, the most tokens of a sequence.
        state_grid: states at multiples of so many tokens go into the rows behind the first of a
            sequence's table.
        segment_ids: documents packed into one row; a token sees only its own. None: one document.
        split: axes of a mesh over which this is a part: "data" has other sequences, "sequence"
            other tokens of the same ones.
        step_blocks: of a list without a cache, blocks of the pools that hold the keys and values of
            this step alone; see `in_blocks`.
        hidden: what enters the layers in place of the tokens' embedding, where the layers before
            ran by themselves. None is the embedding.
        adapters: of a list, the slot of each sequence's adapter, from 1 on; 0 is none.
    """

    tokens: Int[Array, "rows seq"]
    positions: Int[Array, "rows seq"]
    query_lens: Int[Array, " sequences"]
    context_lens: Int[Array, " sequences"]
    query_starts: Int[Array, " sequences"] | None = None
    query_positions: Int[Array, " sequences"] | None = None
    block_tables: tuple[Int[Array, "sequences _"], ...] = ()
    first_positions: tuple[Int[Array, " sequences"], ...] = ()
    longest: int = field(default=0, metadata={"static": True})
    state_grid: int = field(default=1, metadata={"static": True})
    segment_ids: Int[Array, "rows seq"] | None = None
    split: tuple[str, ...] = field(default=(), metadata={"static": True})
    step_blocks: int = field(default=0, metadata={"static": True})
    hidden: Float[Array, "rows seq hidden"] | None = None
    adapters: Int[Array, " sequences"] | None = None

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

    @staticmethod
    def ragged(
        tokens: Int[Array, " tokens"],
        query_starts: Int[Array, " sequences"],
        query_lens: Int[Array, " sequences"],
        query_positions: Int[Array, " sequences"],
        block_tables: tuple[Int[Array, "sequences _"], ...],
        first_positions: tuple[Int[Array, " sequences"], ...],
        *,
        longest: int,
        state_grid: int = 1,
        hidden: Float[Array, "1 tokens hidden"] | None = None,
    ) -> Batch:
        """A list of tokens over a cache."""
        owner, offset = owners(query_starts, query_lens, tokens.shape[0])
        return Batch(
            tokens[None],
            jnp.maximum(query_positions[owner] + offset, 0)[None],
            query_lens,
            query_positions + query_lens,
            query_starts,
            query_positions,
            block_tables,
            first_positions,
            longest,
            state_grid,
            hidden=hidden,
        )

    def in_blocks(self, num_groups: int, block_size: int) -> Batch:
        """A list of whole sequences, each with blocks of its own, the same in every group."""
        assert self.query_starts is not None
        counts = (self.query_lens + (block_size - 1)) // block_size
        first = jnp.cumsum(counts, dtype=jnp.int32) - counts
        most = ceil_div(self.longest, block_size)
        num_blocks = ceil_div(self.tokens.shape[1], block_size) + len(self.query_lens)
        table = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        table = jnp.minimum(table, num_blocks - 1)  # of others, behind a sequence's own
        return replace(
            self,
            block_tables=(table,) * num_groups,
            first_positions=(jnp.zeros_like(first),) * num_groups,
            step_blocks=num_blocks,
        )

    @property
    def num_tokens(self) -> Int[Array, ""] | None:
        """Number of leading real tokens in a list; None for a rectangle, whose tokens all run."""
        if self.query_starts is None:
            return None
        ends = jnp.where(self.query_lens > 0, self.query_starts + self.query_lens, 0)
        return jnp.max(ends)

    @property
    def owners(self) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
        """Sequence of each token of a list, and its number there; see `sequences.owners`."""
        assert self.query_starts is not None
        return owners(self.query_starts, self.query_lens, self.tokens.shape[1])

    @property
    def valid(self) -> jax.Array:
        """[rows, seq] bool: which tokens are real."""
        if self.query_starts is None:
            index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
            return index[None, :] < self.query_lens[:, None]
        owner, offset = self.owners
        return ((offset >= 0) & (offset < self.query_lens[owner]))[None]

    def sequences(self, group: int, first_block: Int[Array, ""] | int = 0) -> Sequences:
        """Sequences of a layer group, as attention reads them.

        Args:
            first_block: of the layer, among those that share a pool.
        """
        assert self.query_starts is not None
        assert self.query_positions is not None
        return Sequences(
            self.query_starts,
            self.query_lens,
            self.query_positions,
            self.context_lens,
            self.block_tables[group] + first_block,
            self.first_positions[group],
            self.longest,
        )

    def runs(self, group: int | None, first_row: Int[Array, ""] | int = 0) -> Runs:
        """Runs of tokens, as layers with state read them.

        Args:
            group: theirs; None without a cache, where each row of tokens has its own row of state.
            first_row: of the layer, among those that share a pool.
        """
        if group is None or self.query_starts is None:
            return self._whole_runs()
        assert self.query_positions is not None
        rows, lens, begin = self.block_tables[group], self.query_lens, self.query_positions
        between = jnp.arange(1, rows.shape[1], dtype=jnp.int32)[None]
        ends = (begin // self.state_grid)[:, None] + between  # of stretches of the grid
        reached = ends * self.state_grid - begin[:, None]
        reached = jnp.concatenate([lens[:, None], reached], axis=1)
        is_kept = (lens[:, None] > 0) & (reached <= lens[:, None]) & (rows > 0)
        targets = jnp.where(is_kept, rows + first_row, NO_ROW)
        state_rows = rows[:, 0] + first_row
        is_new = begin == 0
        options = {"longest": self.longest, "grid": self.state_grid}
        starts, owners = self.query_starts, self.owners
        return Runs(starts, lens, begin, state_rows, is_new, targets, reached, *owners, **options)

    def _whole_runs(self) -> Runs:
        rows, seq = self.tokens.shape
        row = jnp.arange(rows, dtype=jnp.int32)
        lens, index = jnp.full_like(row, seq), jnp.arange(rows * seq, dtype=jnp.int32)
        place = (lens[:, None], index // seq, index % seq)
        runs = row * seq, lens, row * 0, row, row >= 0, row[:, None], *place
        return Runs(*runs, longest=seq, grid=1)

    def slot_mapping(self, group: int, block_size: int) -> jax.Array:
        """Slot of each token's K and V in the pool of a layer group.

        slot = block_table[(position - first_position) // block_size] * block_size
               + position % block_size; padding has no slot (NO_SLOT) and is not written.

        Returns:
            [1, tokens] int32 slots; a slot is block * block_size + offset.
        """
        owner, _ = self.owners
        table = self.block_tables[group]
        # Unsigned: a signed division is a dozen operations. Padding may be below the first.
        relative = (self.positions[0] - self.first_positions[group][owner]).astype(jnp.uint32)
        index = jnp.minimum(relative // block_size, table.shape[1] - 1).astype(jnp.int32)
        block = table.at[owner, index].get(mode="promise_in_bounds")
        slot = block * block_size + (relative % block_size).astype(jnp.int32)
        return jnp.where(self.valid[0], slot, NO_SLOT)[None]
