"""Host arrays that a CPU device can take over without copying."""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64
"""Bytes; XLA's CPU client aliases a NumPy array that begins at a multiple of this."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose data begins at a multiple of ALIGNMENT."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of ALIGNMENT."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
