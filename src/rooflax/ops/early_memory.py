"""Memory for weights, made ready while JAX is imported.

The system zeroes a page when it is first touched, and a virtual machine may have to ask its host
for it: half a gigabyte takes a quarter of a second to a whole one. Importing JAX takes about as
long and keeps one core busy. This module imports no jax.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator

import numpy as np

ALIGNMENT = 64
"""Bytes; XLA's CPU client aliases a NumPy array that begins at a multiple of this."""
SMALLEST = 1 << 26
"""Bytes below which a thread is not worth its start."""
_STEP = 1 << 22
"""Bytes made ready at a time: what is mapped meanwhile, as libraries are, waits for one step."""
_POPULATE_WRITE = 23
"""Linux 5.14's madvise; older ones refuse it, and pages come when they are touched."""


def private_map(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone; Python's default is shared with its children."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def arena_bytes(size: int) -> int:
    """What an array of `size` bytes takes where arrays lie one after the other, each aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class EarlyMemory:
    """Memory that a thread touches, handed out from its beginning."""

    def __init__(self, num_bytes: int):
        self._map = private_map(num_bytes)
        with contextlib.suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(self._map, np.uint8)
        self._touched = self._used = 0
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start, end = self._memory.ctypes.data, self._memory.size
        for begin in range(0, end, _STEP):
            size = min(_STEP, end - begin)
            if self._is_over.is_set() or madvise(start + begin, size, _POPULATE_WRITE) != 0:
                return
            self._touched = begin + size

    @property
    def untaken_bytes(self) -> int:
        """Ready, and nobody's yet."""
        return max(0, self._touched - self._used)

    def take(self, size: int) -> np.ndarray | None:
        """Bytes that begin at a multiple of ALIGNMENT; None where that many are not left."""
        with self._lock:
            begin = arena_bytes(self._used)
            if begin + size > self._memory.size:
                return None
            self._used = begin + size
        return self._memory[begin : begin + size]

    def end(self) -> None:
        """Gives back what nobody took. The rest lives as long as the arrays in it."""
        self._is_over.set()
        self._thread.join()
        with self._lock:
            unused = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
            self._used = self._touched = len(self._map)
        if unused < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, unused, len(self._map) - unused)


_current: EarlyMemory | None = None


@contextlib.contextmanager
def early_memory(num_bytes: int) -> Iterator[None]:
    """While the block runs, `take` has this much memory to give, if it is worth a thread.

    One block at a time in a process.
    """
    global _current
    if num_bytes >= SMALLEST and sys.platform == "linux":
        with contextlib.suppress(OSError):  # none is there: the weights will say so
            _current = EarlyMemory(num_bytes)
    try:
        yield
    finally:
        drop()


def drop() -> None:
    """Nothing more is taken; where weights end up on another device, their arrays come and go."""
    global _current
    memory, _current = _current, None
    if memory is not None:
        memory.end()


def take(size: int) -> np.ndarray | None:
    """Bytes of the memory that is ready, aligned; None where there is none, or not enough."""
    memory = _current
    return None if memory is None else memory.take(size)


def untaken_bytes() -> int:
    """Memory of this process that stands ready for weights; to them it is as good as free."""
    memory = _current
    return 0 if memory is None else memory.untaken_bytes
