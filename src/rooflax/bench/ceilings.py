"""Ceilings of this machine: bytes read and operations multiplied per second.

On CPU by the package's native loops (csrc/ceilings.cc), or by XLA's where those were not built,
labelled so. On other devices by copies and matmuls of the dtype, each a loop in one program: one
call with its dispatch in the clock would read too low, and shares would be too high.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.bench.timing import best_of, timed
from rooflax.nn.device_memory import free_bytes
from rooflax.ops import native
from rooflax.ops.dot import FLOAT32
from rooflax.ops.format_names import KNOWN
from rooflax.ops.weights import CODES as CLASSES
from rooflax.ops.weights import Quantized
from rooflax.ops.weights.blocks import Block

SMALLEST_BUFFER, LARGEST_BUFFER = 1 << 20, 1 << 29
READ_BYTES = 1 << 29
"""Bytes that one reading of a CPU's bandwidth reads, in as many passes as that takes."""
MULTIPLY_S = 2e-4
"""Seconds of one reading of a CPU's products."""
TERMS = "float32xbfloat16"
"""Matmuls of float32 by bfloat16: instructions for bfloat16 take such rows as sums of three."""
CODES = frozenset(format.code for format in KNOWN.values() if format.quantizes_activations)
"""Matmuls with int8 activations; how fast they can be is the code's."""
CPU_MATRIX, DEVICE_MATRIX = 1024, 8192
DEVICE_BUFFER, DEVICE_TURNS = 8 << 30, 8
"""Bytes of what is copied, and how often it is copied, or matrices multiplied, in one program."""


@dataclass(frozen=True)
class Ceiling:
    """One reading of the ceilings.

    Attributes:
        read_gb_per_s: of a buffer as large as what the step reads; on CPU each thread from one
            place and from four at once, the larger of the two.
        flops_per_s: in registers (CPU) or of a large matmul (elsewhere), of what the step
            multiplies.
        source: "native", "xla" or "device".
        buffer_bytes: of what was read or copied; on a device DEVICE_BUFFER, or a quarter of what is
            free if that is less.
    """

    read_gb_per_s: float
    flops_per_s: float
    source: str
    buffer_bytes: int


def ceiling_reader(working_set: int, *multiplied: str) -> Callable[[], Ceiling]:
    """A call that reads the ceilings; buffers and programs are made here, outside any clock.

    Args:
        working_set: bytes that a step reads; a set smaller than the last-level cache gets the
            bandwidth of a buffer of its own size.
        multiplied: a dtype, TERMS, or the code of a format whose activations are int8; of several
            the fastest.
    """
    size = min(max(working_set, SMALLEST_BUFFER), LARGEST_BUFFER)
    if jax.default_backend() != "cpu":
        dtype = {**dict.fromkeys(CODES, "int8"), TERMS: "float32"}.get(multiplied[0], multiplied[0])
        free = free_bytes()
        size = DEVICE_BUFFER if free is None else min(DEVICE_BUFFER, free // 4)
        read = device_reader(size, DEVICE_MATRIX, dtype)
    elif (library := native.load()) is None:
        read = _xla_reader(size, CPU_MATRIX)
    else:
        read = partial(_read_native, _declare(library), np.ones(size // 8, np.uint64), multiplied)
    read()  # touches every page and compiles
    return read


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rooflax_read_bandwidth.restype = ctypes.c_double
    library.rooflax_read_bandwidth.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    library.rooflax_multiply_rate.restype = ctypes.c_double
    library.rooflax_multiply_rate.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
    return library


def _read_native(library: ctypes.CDLL, buffer: np.ndarray, multiplied: tuple[str, ...]) -> Ceiling:
    threads, passes = native.num_threads(), max(1, READ_BYTES // buffer.nbytes)
    address = buffer.ctypes.data
    read = max(
        library.rooflax_read_bandwidth(address, buffer.nbytes, threads, from_four, passes)
        for from_four in (False, True)
    )
    rate = max(multiply_rate(library, each, threads) for each in multiplied)
    return Ceiling(read / 1e9, rate, "native", buffer.nbytes)


def multiply_rate(library: ctypes.CDLL, multiplied: str, threads: int) -> float:
    """Operations per second in registers, in the fastest way that is exact.

    Products of a block type add up as int4's where its codes have at most four bits, else as those
    of int8 in groups.
    """
    if issubclass(kind := CLASSES.get(multiplied, Quantized), Block):
        linear = kind.bits <= 4 and not multiplied.startswith("iq")
        multiplied = "int4" if linear else "int8-g32"
    elif kind.rotates_inputs:  # once a row, before it is multiplied as int8
        multiplied = "int8"
    return library.rooflax_multiply_rate(multiplied.encode(), threads, MULTIPLY_S)


def _xla_reader(size: int, matrix: int) -> Callable[[], Ceiling]:
    """A sum of `size` bytes, and a square matmul of float32."""
    data = jnp.ones(size // 4, jnp.float32)
    square = jnp.ones((matrix, matrix), jnp.float32)
    touch, multiply = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    timed(touch, data)
    timed(multiply, square, square)

    def read() -> Ceiling:
        bandwidth = size / best_of(touch, data)
        rate = 2 * matrix**3 / best_of(multiply, square, square)
        return Ceiling(bandwidth / 1e9, rate, "xla", size)

    return read


def device_reader(size: int, matrix: int, dtype: str) -> Callable[[], Ceiling]:
    """Copies of `size` bytes in place, and square matmuls of random numbers.

    What a matmul gives is as wide as what it takes, but for int8's sums.
    """
    held = [jax.lax.broadcasted_iota(jnp.int32, (8, size // 32), 1)]
    size = held[0].nbytes

    def copy() -> jax.Array:
        held[0] = _copies(held[0])
        return held[0]

    keys = jax.random.split(jax.random.key(0))
    if dtype == "int8":
        a, b = (jax.random.bits(key, (matrix, matrix), jnp.uint8).astype(jnp.int8) for key in keys)
    else:
        a, b = (jax.random.normal(key, (matrix, matrix)).astype(dtype) for key in keys)
    timed(copy)
    timed(_products, a, b)

    def read() -> Ceiling:
        copied = 2 * size * DEVICE_TURNS / best_of(copy)
        rate = 2 * matrix**3 * DEVICE_TURNS / best_of(_products, a, b)
        return Ceiling(copied / 1e9, rate, "device", size)

    return read


@partial(jax.jit, donate_argnums=0)  # else the buffer is copied once more
def _copies(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, DEVICE_TURNS, lambda i, x: x ^ i, x)


@jax.jit
def _products(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T again and again; the barrier keeps the compiler from doing it once."""
    dtype = jnp.int32 if a.dtype == jnp.int8 else a.dtype
    precision = FLOAT32 if a.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))

    def turn(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        product = jax.lax.dot_general(carried[0], b, dims, precision, preferred_element_type=dtype)
        return jax.lax.optimization_barrier((carried[0], product))

    first = jnp.zeros((a.shape[0], b.shape[0]), dtype)
    return jax.lax.fori_loop(0, DEVICE_TURNS, turn, (a, first))[1]
