"""`BlockManager`: which KV block belongs to which sequence. Pure Python, no jax.

Each layer group has a pool of numbered blocks; block 0 is scratch and never given out. A group
with a window lets go of a block once all its tokens are out of sight of the next query.
"""

from __future__ import annotations

from collections import deque

from rooflax.engine.sequence import Sequence
from rooflax.nn.layout import blocks_needed


class BlockManager:
    """Hands out blocks of every group and takes them back."""

    def __init__(
        self, windows: tuple[int | None, ...], num_blocks: tuple[int, ...], block_size: int
    ):
        self.windows = windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = [deque(range(1, count)) for count in num_blocks]
        self._reserved = [0] * len(windows)

    def reservation(self, sequence: Sequence, new_tokens: int) -> list[int]:
        """Per group, the most blocks the sequence can hold at once.

        Args:
            new_tokens: the most tokens written between two calls of `allocate`.
        """
        return [
            blocks_needed(window, sequence.longest, new_tokens, self.block_size)
            for window in self.windows
        ]

    def fits_at_all(self, needed: list[int]) -> bool:
        return all(n < total for n, total in zip(needed, self.num_blocks, strict=True))

    def can_reserve(self, needed: list[int]) -> bool:
        """Whether so many blocks of each group are neither taken nor promised."""
        return all(
            held + n < total
            for held, n, total in zip(self._reserved, needed, self.num_blocks, strict=True)
        )

    def reserve(self, sequence: Sequence, needed: list[int]) -> None:
        """Promises blocks to a sequence, so that it can run to its end."""
        for group, n in enumerate(needed):
            self._reserved[group] += n
        sequence.block_tables = [[] for _ in self.windows]
        sequence.first_positions = [0] * len(self.windows)

    def allocate(self, sequence: Sequence, up_to: int) -> None:
        """Gives the sequence blocks for its tokens at positions below `up_to`.

        Window groups first let go of what the next query, at `num_computed_tokens`, cannot see.
        """
        for group, window in enumerate(self.windows):
            table = sequence.block_tables[group]
            if window is not None:
                self._release_behind(sequence, group, sequence.num_computed_tokens - window + 1)
            end = sequence.first_positions[group] + len(table) * self.block_size
            while end < up_to:
                table.append(self.free[group].popleft())
                end += self.block_size

    def _release_behind(self, sequence: Sequence, group: int, first_visible: int) -> None:
        table = sequence.block_tables[group]
        while table and sequence.first_positions[group] + self.block_size <= first_visible:
            self.free[group].append(table.pop(0))
            sequence.first_positions[group] += self.block_size

    def deallocate(self, sequence: Sequence, reserved: list[int]) -> None:
        """Takes back all blocks of a sequence, and the promise."""
        for group, table in enumerate(sequence.block_tables):
            self.free[group].extend(table)
            self._reserved[group] -= reserved[group]
        sequence.block_tables = []
        sequence.first_positions = []

    @property
    def num_free(self) -> list[int]:
        return [len(free) for free in self.free]
