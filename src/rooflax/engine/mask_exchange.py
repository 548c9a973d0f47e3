"""`MaskExchange`: masks of constrained rows, made on the host while the device computes. No jax.

A mask follows from every token before it. In a loop of decode steps the native sampler publishes
the tokens that it chose; a thread here makes the masks of the next step while the layers of that
step run; the next sampler waits for them (csrc/mask_exchange.h). So a row with a grammar takes part
in several decode steps per dispatch like any other.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from rooflax.engine.sequence import Constraint


class ConstrainedRow(NamedTuple):
    """A row of a step, and the slot and the grammar constraint of its sequence."""

    row: int
    slot: int
    constraint: Constraint


class MaskExchange:
    """One per engine.

    Args:
        library: the native library.
        shape: of the masks, [slots, words]; a step has at most as many rows as there are slots.

    Attributes:
        number: by which the sampler finds it; 0 stands for none.
    """

    def __init__(self, library: ctypes.CDLL, shape: tuple[int, int]):
        self._library = library
        pointer, int64 = ctypes.POINTER(ctypes.c_int32), ctypes.c_int64
        library.rooflax_masks_new.argtypes = [int64, int64, int64]
        library.rooflax_masks_await_tokens.argtypes = [ctypes.c_int32, int64]
        library.rooflax_masks_publish.argtypes = [ctypes.c_int32, int64]
        library.rooflax_masks_publish.restype = None
        for name in ("words", "tokens"):
            getattr(library, f"rooflax_masks_{name}").restype = pointer
        slots, words = shape
        self.number: int = library.rooflax_masks_new(slots, slots, words)
        self._masks = np.ctypeslib.as_array(library.rooflax_masks_words(self.number), shape)
        self._tokens = np.ctypeslib.as_array(library.rooflax_masks_tokens(self.number), (slots,))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rooflax-masks")
        self._delete = weakref.finalize(self, library.rooflax_masks_delete, self.number)

    @contextmanager
    def serving(self, rows: list[ConstrainedRow], num_steps: int) -> Iterator[None]:
        """While it lasts, the masks of the steps after the first are made as tokens come.

        Guides are then ahead of their sequences by the tokens that came; if the dispatch fails,
        they go back.
        """
        library, number = self._library, self.number
        library.rooflax_masks_begin(number)
        made = self._thread.submit(self._serve, rows, num_steps)
        try:
            try:
                yield
            finally:
                library.rooflax_masks_end(number)
                made.result()
        except BaseException:
            for row in rows:
                row.constraint.go_back()
            raise

    def _serve(self, rows: list[ConstrainedRow], num_steps: int) -> None:
        try:
            self._make_masks(rows, num_steps)
        except BaseException:  # nothing comes any more, and the sampler must not wait for it
            self._library.rooflax_masks_end(self.number)
            raise

    def _make_masks(self, rows: list[ConstrainedRow], num_steps: int) -> None:
        library, number = self._library, self.number
        for step in range(1, num_steps):
            if not library.rooflax_masks_await_tokens(number, step - 1):
                return
            tokens = self._tokens.tolist()
            for row, slot, constraint in rows:
                mask, words = constraint.look_ahead(tokens[row]), self._masks[slot]
                words[: mask.size] = mask
                words[mask.size :] = 0
            library.rooflax_masks_publish(number, step)
