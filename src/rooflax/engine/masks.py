"""`Masks`: the allowed tokens of constrained rows, as the sampler's bits per slot. No jax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rooflax.engine.mask_exchange import ConstrainedRow, MaskExchange
from rooflax.engine.sequence import Sequence, fault_of
from rooflax.ops import native


class Masks:
    """The masks of a runner's slots.

    Args:
        shape: [slots, words].
        exchanges: whether decode steps of one dispatch have masks of their own each, because the
            sampler waits for them. Otherwise all run with the masks of the first.
    """

    def __init__(self, shape: tuple[int, int], *, exchanges: bool):
        self.exchanges = exchanges
        self._words = np.full(shape, -1, np.int32)
        self._exchange: MaskExchange | None = None

    @property
    def everything(self) -> np.ndarray:
        """Masks of rows without a constraint."""
        return np.full_like(self._words, -1)

    def of(self, sequences: list[Sequence], counts: list[int]) -> np.ndarray | None:
        """Masks of the rows after a step of so many tokens each; None if no sampled row has a
        constraint.

        Raises:
            RowError: a constraint failed.
        """
        is_constrained = False
        for sequence, count in zip(sequences, counts, strict=True):
            constraint = sequence.sampler.constraint
            if constraint is not None and count == sequence.num_uncomputed_tokens:
                with fault_of(sequence):
                    mask, row = constraint.mask, self._words[sequence.schedule.slot]
                    row[: mask.size] = mask
                    row[mask.size :] = 0
                is_constrained = True
        return self._words.copy() if is_constrained else None

    def is_sent(self, slot: int | None, mask: np.ndarray) -> bool:
        """Whether this is the mask of a slot that the last step ran with."""
        return np.array_equal(mask, self._words[slot][: mask.size])

    @contextmanager
    def during(self, sequences: list[Sequence], num_steps: int) -> Iterator[int]:
        """Makes the masks of later decode steps while a dispatch lasts; gives the number of the
        exchange by which the sampler has them, 0 where it does not wait."""
        if not self.exchanges or num_steps == 1:
            yield 0
            return
        if self._exchange is None:
            library = native.load()
            assert library is not None
            self._exchange = MaskExchange(library, self._words.shape)
        rows = [
            ConstrainedRow(row, s.schedule.slot, s.sampler.constraint)
            for row, s in enumerate(sequences)
            if s.sampler.constraint is not None and s.schedule.slot is not None
        ]
        with self._exchange.serving(rows, num_steps):
            yield self._exchange.number
