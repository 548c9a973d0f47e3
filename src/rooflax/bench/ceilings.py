"""What this machine allows: bytes per second read, operations per second multiplied.

On CPU by the package's native loops (csrc/ceilings.cc), or by XLA's where those were not built,
labelled so. On other devices by a copy and a matrix product of the dtype.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.bench.timing import best_of, timed
from rooflax.ops import native
from rooflax.ops.formats import FORMATS

SMALLEST_BUFFER, LARGEST_BUFFER = 1 << 20, 1 << 29
READ_BYTES = 1 << 29
"""Bytes that one reading of a CPU's bandwidth reads, in as many passes as that takes."""
MULTIPLY_OPERATIONS = 5e7
"""Per thread and reading of a CPU."""
CODES = frozenset(format.code for format in FORMATS.values() if format.quantizes_activations)
"""Matmuls with int8 activations; how fast they can be is the code's."""
CPU_MATRIX, DEVICE_MATRIX = 1024, 8192
DEVICE_BUFFER = 1 << 30


@dataclass(frozen=True)
class Ceiling:
    """One reading of the ceilings.

    Attributes:
        read_gb_per_s: of a buffer as large as what the step reads; on CPU each thread from one
            place and from four at once, the larger of the two.
        flops_per_s: in registers (CPU) or of a large matmul (elsewhere), of what the step
            multiplies.
        source: "native", "xla" or "device".
    """

    read_gb_per_s: float
    flops_per_s: float
    source: str


def ceiling_reader(working_set: int, multiplied: str) -> Callable[[], Ceiling]:
    """A call that reads the ceilings; buffers and programs are made here, outside any clock.

    Args:
        working_set: bytes that a step reads; a set smaller than the last-level cache gets the
            bandwidth of a buffer of its own size.
        multiplied: a dtype, or the code of a format whose activations are int8.
    """
    size = min(max(working_set, SMALLEST_BUFFER), LARGEST_BUFFER)
    if jax.default_backend() != "cpu":
        dtype = "int8" if multiplied in CODES else multiplied
        read = _xla_reader(DEVICE_BUFFER, DEVICE_MATRIX, dtype, "device")
    elif (library := native.load()) is None:
        read = _xla_reader(size, CPU_MATRIX, "float32", "xla")
    else:
        read = partial(_read_native, _declare(library), np.ones(size // 8, np.uint64), multiplied)
    read()  # touches every page and compiles
    return read


def num_threads() -> int:
    """Threads that XLA's CPU client uses: PJRT_NPROC, else the affinity mask."""
    given = os.environ.get("PJRT_NPROC", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rooflax_read_bandwidth.restype = ctypes.c_double
    library.rooflax_read_bandwidth.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    library.rooflax_multiply_rate.restype = ctypes.c_double
    library.rooflax_multiply_rate.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
    return library


def _read_native(library: ctypes.CDLL, buffer: np.ndarray, multiplied: str) -> Ceiling:
    threads, passes = num_threads(), max(1, READ_BYTES // buffer.nbytes)
    address = buffer.ctypes.data
    read = max(
        library.rooflax_read_bandwidth(address, buffer.nbytes, threads, from_four, passes)
        for from_four in (False, True)
    )
    return Ceiling(read / 1e9, multiply_rate(library, multiplied, threads), "native")


def multiply_rate(library: ctypes.CDLL, multiplied: str, threads: int) -> float:
    """Operations per second in registers, in the fastest way that is exact."""
    return library.rooflax_multiply_rate(multiplied.encode(), threads, MULTIPLY_OPERATIONS)


def _xla_reader(size: int, matrix: int, dtype: str, source: str) -> Callable[[], Ceiling]:
    """A copy (device) or a sum (CPU) of `size` bytes, and a square matmul."""
    data = jnp.ones(size // 4, jnp.float32)
    square = jnp.ones((matrix, matrix), jnp.dtype(dtype))
    is_copy = source == "device"
    touch = jax.jit((lambda x: x + 1.0) if is_copy else jnp.sum)
    product = jax.jit(jnp.matmul)
    timed(touch, data)
    timed(product, square, square)
    moved = size * (2 if is_copy else 1)

    def read() -> Ceiling:
        bandwidth = moved / best_of(touch, data)
        return Ceiling(bandwidth / 1e9, 2 * matrix**3 / best_of(product, square, square), source)

    return read
