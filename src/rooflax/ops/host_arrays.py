"""Host arrays that a CPU device can take over without copying."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes; XLA's CPU client aliases a NumPy array that begins at a multiple of this."""
Put = Callable[[np.ndarray], Any]
"""A host array to the device."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array whose data begins at a multiple of ALIGNMENT.

    NumPy asks for huge pages for large ones, which a device's own copy would not have.
    """
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As `aligned_empty`, of zeros."""
    return _aligned(np.zeros, shape, dtype)


def _aligned(
    make: Callable[..., np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = make(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def aligned_put(array: np.ndarray) -> Any:
    """A copy that begins at a multiple of ALIGNMENT, on the device."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return jax.device_put(copy)


class Together:
    """Memory of huge pages that smaller arrays lie in one after the other."""

    _BLOCK = 1 << 25

    def __init__(self):
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """As `aligned_empty`; the memory is given back with the last array in it."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._free.size < arena_bytes(size):
            self._free = aligned_empty((max(self._BLOCK, arena_bytes(size)),), np.dtype(np.uint8))
        buffer, self._free = self._free[:size], self._free[arena_bytes(size) :]
        return buffer.view(dtype).reshape(shape)


def arena_bytes(size: int) -> int:
    """Bytes of an array of `size` bytes in an arena, where each is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _private_map(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone; Python's default is shared with its children."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Arena:
    """Memory for arrays that come and go together, taken once.

    What a device aliases of it must be deleted before `clear`.
    """

    def __init__(self, num_bytes: int):
        self._memory = np.frombuffer(_private_map(max(num_bytes, 1)), np.uint8)
        self._used, self._lock = 0, threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """As `aligned_empty`."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            begin, self._used = self._used, self._used + arena_bytes(size)
        assert self._used <= self._memory.size
        return self._memory[begin : begin + size].view(dtype).reshape(shape)

    def put(self, array: np.ndarray) -> Any:
        """A copy on the device, which takes over the memory here if it is a CPU."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return jax.device_put(copy)

    def clear(self) -> None:
        """All of it is free again."""
        self._used = 0
