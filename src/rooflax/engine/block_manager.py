"""`BlockManager`: which KV block belongs to which sequences. Pure Python, no jax.

Each layer group has a pool of numbered blocks; block 0 is scratch and never given out. A full block
is known by a hash of its tokens and everything before them, so that sequences with the same
beginning share it; its content stays after its last owner until the block is needed, least
recently used first. A group with a window lets go of a block once all its tokens are out of sight
of the next query.

The blocks of the group with state are rows: one sequence's state in all those layers. A row that
nobody owns may hold the state at a block's end, a snapshot, known by that block's hash. A sequence
never writes into one: it continues from a copy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import NamedTuple

from rooflax.engine.sequence import Sequence
from rooflax.nn.layout import STATE, blocks_needed, ceil_div, state_grid


def _digest(data: bytes, domain: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, person=domain).digest()


def _salted(salt: str) -> bytes:
    """Hash that a salt's chain of blocks begins with, in a domain of its own, so that no salt
    equals a hash of blocks with another."""
    return _digest(salt.encode(), b"rooflax salt")


class BlockCopy(NamedTuple):
    """A block of a layer group whose content another one is to have."""

    group: int
    source: int
    destination: int


class BlockPool:
    """The blocks of one layer group: who owns them, and what the full ones hold."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds what the hash stands for."""
        return self._block_of.get(block_hash)

    def is_known(self, block: int) -> bool:
        """Whether others may share what the block holds."""
        return block in self._hash_of

    def take(self) -> tuple[int, bytes | None]:
        """The free block that was used longest ago, and the hash of what it held: forgotten."""
        block, _ = self.free.popitem(last=False)
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
        self.ref_count[block] = 1
        return block, block_hash

    def forget(self, block_hash: bytes) -> None:
        """A free block that holds this is the next to be taken, and known no more."""
        block = self._block_of.get(block_hash)
        if block is not None and self.ref_count[block] == 0:
            del self._block_of[block_hash], self._hash_of[block]
            self.free.move_to_end(block, last=False)

    def share(self, block: int) -> None:
        """One more owner."""
        self.free.pop(block, None)
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """One owner less; without any it is free, and first in line if it holds nothing."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self._hash_of)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Says what a full block holds, unless another block is known for it."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash], self._hash_of[block] = block, block_hash


class BlockManager:
    """Hands out blocks of every group and takes them back.

    Args:
        state_rows: that a sequence has in the group with state: one, and one for each draft.

    Attributes:
        shared_tokens: what is shared ends at multiples of it.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        num_blocks: tuple[int, ...],
        block_size: int,
        *,
        prefix_caching: bool = True,
        state_rows: int = 1,
    ):
        self.windows, self._state_rows = windows, state_rows
        self._state = windows.index(STATE) if STATE in windows else None
        self.shared_tokens = block_size if self._state is None else state_grid(block_size)
        self._windowed = [(i, w) for i, w in enumerate(windows) if w not in (None, STATE)]
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pools = [BlockPool(count) for count in num_blocks]

    @property
    def num_used(self) -> list[int]:
        return [pool.num_blocks - 1 - len(pool.free) for pool in self.pools]

    def fits_at_all(self, sequence: Sequence, new_tokens: int) -> bool:
        """Whether the sequence, with its siblings, could run to its end alone.

        Args:
            new_tokens: the most tokens written between two calls of `free_out_of_window`.
        """
        needed = self._most_blocks(sequence.longest, new_tokens)
        count = len(sequence.schedule.siblings)
        return all(count * n < pool.num_blocks for n, pool in zip(needed, self.pools, strict=True))

    def _most_blocks(self, num_tokens: int, new_tokens: int) -> list[int]:
        sizes = (num_tokens, new_tokens, self.block_size, self._state_rows)
        return [blocks_needed(window, *sizes) for window in self.windows]

    def can_admit(self, sequence: Sequence, num_cached: int, new_tokens: int) -> bool:
        """Whether all tokens so far, and one more, find a place behind `num_cached` shared ones."""
        needed = self._most_blocks(sequence.num_tokens + 1, new_tokens)
        for group, pool in enumerate(self.pools):
            cached = self._cached_blocks(sequence, group, num_cached)
            taken = sum(pool.ref_count[block] > 0 for block in cached)
            if group == self._state:
                taken -= len(cached)  # which is copied
            if needed[group] - taken > len(pool.free):
                return False
        return True

    def num_cached(self, sequence: Sequence) -> int:
        """Number of leading tokens in cached blocks, at most all but the last.

        The full group needs every block; a window group those that the next query still sees; the
        group with state the snapshot at their end.
        """
        if not self.prefix_caching or not sequence.may_share:
            return 0
        hashes = self.hashes(sequence, (sequence.num_tokens - 1) // self.block_size)
        runs, longest = [0] * len(self.pools), 0
        for count, block_hash in enumerate(hashes, start=1):
            hits = [pool.find(block_hash) is not None for pool in self.pools]
            runs = [run + 1 if hit else 0 for run, hit in zip(runs, hits, strict=True)]
            if not all(hit or w is not None for hit, w in zip(hits, self.windows, strict=True)):
                break
            needed = [count - self._first_visible_block(w, count) for w in self.windows]
            if all(run >= n for run, n in zip(runs, needed, strict=True)):
                longest = count
        return longest * self.block_size

    def _first_visible_block(self, window: int | None, num_blocks: int) -> int:
        """The first block that the query after `num_blocks` full ones sees."""
        if window is None:
            return 0
        if window == STATE:
            return max(0, num_blocks - 1)
        return max(0, num_blocks * self.block_size - window + 1) // self.block_size

    def _cached_blocks(self, sequence: Sequence, group: int, num_cached: int) -> list[int]:
        count = num_cached // self.block_size
        first = self._first_visible_block(self.windows[group], count)
        blocks = [self.pools[group].find(h) for h in self.hashes(sequence, count)[first:]]
        return [block for block in blocks if block is not None]

    def hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the first `count` blocks: each covers its tokens, all before them and the cache
        salt."""
        known, size = sequence.kv.block_hashes, self.block_size
        while len(known) < count:
            parent = known[-1] if known else _salted(sequence.kv.cache_salt)
            tokens = array("i", sequence.tokens[len(known) * size : (len(known) + 1) * size])
            known.append(_digest(parent + tokens.tobytes(), b"rooflax block"))
        return known[:count]

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Shares the blocks of the first `num_cached` tokens with the sequence."""
        kv = sequence.kv
        kv.block_tables, kv.first_positions = [], []
        kv.version += 1
        for group, pool in enumerate(self.pools):
            blocks = self._cached_blocks(sequence, group, num_cached)
            for block in blocks:
                pool.share(block)
            first = num_cached - len(blocks) * self.block_size
            kv.block_tables.append(blocks)
            kv.first_positions.append(0 if group == self._state else first)
        sequence.num_computed_tokens = num_cached
        kv.num_published_blocks = num_cached // self.block_size
        kv.num_writable_tokens = num_cached

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Releases what the next query, at `num_computed_tokens`, cannot see."""
        kv = sequence.kv
        for group, window in self._windowed:
            assert window is not None
            table = kv.block_tables[group]
            first_visible = sequence.num_computed_tokens - window + 1
            while table and kv.first_positions[group] + self.block_size <= first_visible:
                self.pools[group].release(table.pop(0))
                kv.first_positions[group] += self.block_size
                kv.version += 1

    def holds(self, sequence: Sequence, up_to: int) -> bool:
        """Whether the sequence can write its tokens below `up_to` into blocks that it has."""
        return up_to <= sequence.kv.num_writable_tokens

    def missing(self, sequence: Sequence, up_to: int) -> list[int]:
        """Per group, the blocks that the positions below `up_to` still lack."""
        missing = []
        for group, (first, table) in enumerate(
            zip(sequence.kv.first_positions, sequence.kv.block_tables, strict=True)
        ):
            needed = ceil_div(up_to - first, self.block_size)
            needed = self._state_rows if group == self._state else needed
            is_copied = self._shared_tail(sequence, group) is not None
            missing.append(max(0, needed - len(table)) + is_copied)
        return missing

    def _shared_tail(self, sequence: Sequence, group: int) -> int | None:
        """Index in the table of the next token's block if it exists and is shared; of rows of
        state, of the first if others may read it."""
        kv = sequence.kv
        if group == self._state:
            pool, rows = self.pools[group], kv.block_tables[group]
            return 0 if rows and (pool.ref_count[rows[0]] > 1 or pool.is_known(rows[0])) else None
        table, first = kv.block_tables[group], kv.first_positions[group]
        index = (sequence.num_computed_tokens - first) // self.block_size
        has_others = index < len(table) and self.pools[group].ref_count[table[index]] > 1
        return index if has_others else None

    def can_allocate(self, missing: list[list[int]]) -> bool:
        """Whether all of these find free blocks together."""
        needed = [sum(group) for group in zip(*missing, strict=True)]
        return all(n <= len(pool.free) for n, pool in zip(needed, self.pools, strict=False))

    def allocate(self, sequence: Sequence, up_to: int) -> list[BlockCopy]:
        """Gives the sequence blocks for its tokens at positions below `up_to`.

        Returns:
            What must be copied before the next token is written: the block that it goes into, of
            each group in which others own that too.
        """
        kv = sequence.kv
        copies = []
        kv.version += 1
        for group, (pool, table) in enumerate(zip(self.pools, kv.block_tables, strict=True)):
            tail = self._shared_tail(sequence, group)
            if tail is not None:
                source, table[tail] = table[tail], self._take(group)
                pool.release(source)
                copies.append(BlockCopy(group, source, table[tail]))
        missing = self.missing(sequence, up_to)
        for group, (table, count) in enumerate(zip(kv.block_tables, missing, strict=True)):
            table.extend(self._take(group) for _ in range(count))
        ends = [
            first + self.block_size * len(table)
            for group, (first, table) in enumerate(
                zip(kv.first_positions, kv.block_tables, strict=True)
            )
            if group != self._state
        ]
        kv.num_writable_tokens = min(ends, default=up_to)
        return copies

    def _take(self, group: int) -> int:
        """A free block of the group; a snapshot goes with the block at whose end it is."""
        block, block_hash = self.pools[group].take()
        if self._state is not None and block_hash is not None and self.windows[group] is None:
            self.pools[self._state].forget(block_hash)
        return block

    def reserve_snapshots(self, sequence: Sequence, up_to: int) -> None:
        """Rows for the states that the sequence's next step comes past, as far as any are free.

        Args:
            up_to: where the step ends at the latest.
        """
        if self._state is None or not self.prefix_caching:
            return
        grid, pool = self.shared_tokens, self.pools[self._state]
        first = (sequence.num_computed_tokens // grid + 1) * grid
        for position in range(first, up_to + 1, grid):
            if not pool.free:
                break
            sequence.kv.snapshots.append((position, self._take(self._state)))
            sequence.kv.version += 1

    def keep_state(self, sequence: Sequence, num_tokens: int) -> None:
        """After a step with drafts: continues from the state after the first of its tokens, as many
        as were accepted."""
        if self._state is not None:
            rows = sequence.kv.block_tables[self._state]
            rows[0], rows[num_tokens] = rows[num_tokens], rows[0]
            sequence.kv.version += 1

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """The child gives its blocks back and owns the parent's with it, those that hold tokens.

        Neither writes into the last one while the other owns it: `allocate` gives copies out.
        """
        written, tables = parent.num_computed_tokens, []
        for group, table in enumerate(parent.kv.block_tables):
            count = ceil_div(written - parent.kv.first_positions[group], self.block_size)
            tables.append(table[: 1 if group == self._state else count])
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:
                pool.share(block)
        self.deallocate(child)
        child.kv.block_tables = tables
        child.kv.first_positions = list(parent.kv.first_positions)
        child.kv.block_hashes = list(parent.kv.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens
        child.kv.num_published_blocks = parent.kv.num_published_blocks
        child.kv.num_writable_tokens = parent.kv.num_writable_tokens = 0

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that the last step filled known to other sequences."""
        kv = sequence.kv
        if not self.prefix_caching:
            return
        if self._state is not None:
            self._publish_snapshots(sequence, self.pools[self._state])
        full = sequence.num_computed_tokens // self.block_size
        if full == kv.num_published_blocks:
            return
        hashes = self.hashes(sequence, full)
        for pool, window, first, table in zip(
            self.pools,
            self.windows,
            kv.first_positions,
            kv.block_tables,
            strict=True,
        ):
            if window == STATE:
                continue
            for index in range(kv.num_published_blocks, full):
                pool.publish(table[index - first // self.block_size], hashes[index])
        kv.num_published_blocks = full

    def _publish_snapshots(self, sequence: Sequence, pool: BlockPool) -> None:
        """Publishes the snapshots that the last step wrote; their rows are free from then on."""
        for position, row in sequence.kv.snapshots:
            if position <= sequence.num_computed_tokens:
                pool.publish(row, self.hashes(sequence, position // self.block_size)[-1])
        self._release_snapshots(sequence)

    def _release_snapshots(self, sequence: Sequence) -> None:
        kv = sequence.kv
        for _, row in kv.snapshots:
            assert self._state is not None
            self.pools[self._state].release(row)
            kv.version += 1
        kv.snapshots = []

    def deallocate(self, sequence: Sequence) -> None:
        """Takes back all blocks of a sequence, the last ones to be reused first."""
        kv = sequence.kv
        self._release_snapshots(sequence)
        for pool, table in zip(self.pools, kv.block_tables, strict=False):
            for block in reversed(table):
                pool.release(block)
        kv.block_tables, kv.first_positions = [], []
        kv.version += 1
        kv.num_writable_tokens = 0
