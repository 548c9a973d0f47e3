"""The package's native library (csrc/): opened once, its kernels registered with XLA's CPU client.

Absent where it could not be built; `status` says why.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np

LIBRARY = "librooflax_native.so"
TARGETS = (
    "rooflax_matmul", "rooflax_attention", "rooflax_rows", "rooflax_argmax", "rooflax_sample",
    "rooflax_cache_write", "rooflax_delta_rule", "rooflax_causal_conv", "rooflax_numbers",
    "rooflax_norm", "rooflax_zeros", "rooflax_whole_attention", "rooflax_whole_attention_gradients",
    "rooflax_adapters", "rooflax_matmul_transposed",
)  # fmt: skip
LAYOUTS = (
    "matrix", "table", "pairs", "int8", "int8-h64", "fp8", "int8-g32", "int4", "mxfp4", "q4_1",
    "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "int6",
    "fp8-g32", "nf4", "nvfp4",
)  # fmt: skip
"""Layouts of weights that its kernels read: [in, out], [out, in], `Pairs`, and codes."""
READ_AS = {"int4-z64": "q4_k", "int4-z128": "q4_k"}
"""Codes whose arrays are those of another layout."""
KERNELS_VERSION = 26
"""Version of what the arguments of its functions mean; csrc/attention_ffi.cc says the library's."""
OLDER = "the native library is not of this version; install rooflax again"
INSTRUCTION_SETS = (
    "generic", "avx2", "avx2-vnni", "avx512", "avx512-far", "avx512-bf16", "amx", "neon-dotprod",
    "neon-i8mm",
)  # fmt: skip


@dataclass(frozen=True)
class Status:
    """Whether the kernels can run here.

    Attributes:
        ready: they are registered.
        reason: why not, as a sentence; or the instruction set in use.
    """

    ready: bool
    reason: str


def library_path() -> Path | None:
    """Path of the installed library; None if the package was installed without a compiler.

    An editable install keeps it apart from the sources: every folder of the package is looked at.
    """
    package = find_spec("rooflax")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "native" / LIBRARY
        if path.is_file():
            return path
    return None


@cache
def load() -> ctypes.CDLL | None:
    """The opened library; None where there is none, or this system cannot open it."""
    path = library_path()
    try:
        return ctypes.CDLL(str(path)) if path else None
    except OSError:
        return None


def is_ready() -> bool:
    """Whether this process computes on CPU and has the kernels."""
    return status().ready


@cache
def status() -> Status:
    """Registers the kernels if they fit this jaxlib; a newer interface would cost JAX its CPU."""
    if jax.default_backend() != "cpu":
        return Status(
            False, f"the native kernels are for CPU, and JAX runs on {jax.default_backend()}"
        )
    library = load()
    if library is None:
        return Status(False, "the native library was not built: no C++ compiler at installation")
    functions = ("rooflax_ffi_version", "rooflax_kernels_version", "rooflax_layouts")
    if not all(hasattr(library, name) for name in (*functions, *TARGETS)):
        return Status(False, OLDER)
    if library.rooflax_kernels_version() != KERNELS_VERSION:
        return Status(False, OLDER)
    if set(layouts()) != set(LAYOUTS):
        return Status(
            False,
            f"the native library has the weight layouts {', '.join(layouts())}, and this version "
            f"has {', '.join(LAYOUTS)}; install rooflax again",
        )
    built, here = library.rooflax_ffi_version(), _ffi_version()
    if here is None or built > here:
        return Status(
            False,
            f"the native library was built for FFI version {built}, and this jaxlib has {here}; "
            f"install rooflax again",
        )
    for name in TARGETS:
        target = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return Status(True, instruction_set())


@cache
def layouts() -> dict[str, int]:
    """The library's numbers of weight layouts, by their names."""
    library = load()
    assert library is not None
    library.rooflax_layouts.restype = ctypes.c_char_p
    pairs = (pair.split("=") for pair in library.rooflax_layouts().decode().split())
    return {name: int(number) for name, number in pairs}


def layout(code: str) -> int:
    """The library's number of the layout of a weight."""
    return layouts()[READ_AS.get(code, code)]


def unreadable(code: str) -> str | None:
    """Reason why the kernels cannot read weights of this layout; None if they can."""
    known = READ_AS.get(code, code) in LAYOUTS
    return None if known else f"the native kernels have no {code} weights"


def _ffi_version() -> int | None:
    """Version in jaxlib's header, major * 1000 + minor."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if matches[0] is None or matches[1] is None:
        return None
    return int(matches[0].group(1)) * 1000 + int(matches[1].group(1))


def block_packer() -> Callable[[str, np.ndarray, int, np.ndarray, np.ndarray], bool] | None:
    """Packs GGUF blocks: (type, addresses of rows, groups of 32, values, scales) -> is known.

    Threads of its own do it, as many as the process may use; None without the library.
    """
    library = load()
    if library is None or not hasattr(library, "rooflax_pack_blocks"):
        return None
    function = library.rooflax_pack_blocks
    function.restype = ctypes.c_bool
    function.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    threads = num_threads()

    def pack(
        kind: str, rows: np.ndarray, groups: int, values: np.ndarray, scales: np.ndarray
    ) -> bool:
        addresses = np.ascontiguousarray(rows, np.uint64)
        return function(
            kind.encode(), addresses.ctypes.data, len(addresses), groups, values.ctypes.data,
            scales.ctypes.data, threads,
        )  # fmt: skip

    return pack


def pack_pairs(matrix: np.ndarray, to: np.ndarray) -> bool:
    """A contiguous [in, out] of two bytes each as panels of pairs; whether the library did it."""
    library = load()
    if library is None or not hasattr(library, "rooflax_pack_pairs"):
        return False
    function = library.rooflax_pack_pairs
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    matrix = np.ascontiguousarray(matrix)
    function(matrix.ctypes.data, *matrix.shape, to.ctypes.data, num_threads())
    return True


def prefers_pairs() -> bool:
    """Whether matmuls here read bfloat16 as panels of pairs best: by tiles of AMX, or by products
    of pairs (AVX512-BF16)."""
    return is_ready() and instruction_set() in ("amx", "avx512-bf16")


def num_threads() -> int:
    """Threads that XLA's CPU client uses: PJRT_NPROC, else the affinity mask."""
    stated = os.environ.get("PJRT_NPROC", "")
    if stated.isdecimal() and int(stated) > 0:
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rotator() -> Callable[[np.ndarray], np.ndarray] | None:
    """Rotates each 64 numbers of a float32 array; None without the library."""
    library = load()
    if library is None or not hasattr(library, "rooflax_rotate"):
        return None
    function = library.rooflax_rotate
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    def rotate(x: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(x, np.float32)
        out = np.empty_like(values)
        function(values.ctypes.data, values.size, out.ctypes.data)
        return out

    return rotate


def encoder(code: str) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]] | None:
    """`encoded` of `weights.iq4` or `weights.int6` by threads; None without the library.

    Args:
        code: "iq4" or "int6".
    """
    library, name = load(), f"rooflax_encode_{code}"
    if library is None or not hasattr(library, name):
        return None
    function = getattr(library, name)
    function.restype = None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, size, pointer, pointer, pointer, ctypes.c_int]

    def encode(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = np.ascontiguousarray(groups, np.float32)
        codes = np.empty(values.shape, np.uint8)
        scales, largest = np.empty((2, len(values)), np.float32)
        arrays = (array.ctypes.data for array in (codes, scales, largest))
        function(values.ctypes.data, len(values), *arrays, num_threads())
        return codes, scales, largest

    return encode


def instruction_set() -> str:
    """The one that the kernels use now."""
    library = load()
    if library is None:
        return "none"
    library.rooflax_instruction_set.restype = ctypes.c_char_p
    return library.rooflax_instruction_set().decode()


def force_instruction_set(name: str) -> bool:
    """Forces one of INSTRUCTION_SETS for all work, or "" for none, in tests; False if this
    processor lacks it."""
    library = load()
    return library is not None and bool(library.rooflax_force_instruction_set(name.encode()))


class _Pieces(ctypes.Structure):
    """`rooflax_pieces` of csrc/matmul_ffi.cc."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("type", ctypes.c_char_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)), ("rank", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    )  # fmt: skip


def matmul_seconds(
    variant: str,
    code: str,
    *,
    quantizes: bool,
    shape: tuple[int, int, int],
    arrays: Sequence[tuple[int, str, tuple[int, ...], int]],
    count: int,
) -> float | None:
    """Seconds of a matmul by one of INSTRUCTION_SETS, the least over pieces that it reads in turn.

    Args:
        quantizes: activations are rounded to int8.
        shape: rows, inputs and outputs.
        arrays: of weights, scales and sums the first piece's address, its dtype and shape, and the
            bytes from a piece to the next.
        count: pieces, of which the first is not timed.

    Returns:
        None where this processor lacks the variant, or its bits are not the default's.
    """
    library = load()
    assert library is not None
    function = library.rooflax_time_matmul
    function.restype = ctypes.c_double
    size = ctypes.c_int64
    function.argtypes = [
        ctypes.c_char_p, size, ctypes.c_int, size, size, size, ctypes.c_void_p, size, ctypes.c_int,
    ]  # fmt: skip
    pieces = (_Pieces * len(arrays))(*(
        _Pieces(address, dtype.encode(), (size * len(dims))(*dims), len(dims), step)
        for address, dtype, dims, step in arrays
    ))  # fmt: skip
    seconds = function(
        variant.encode(), layout(code), quantizes, *shape, pieces, count, num_threads()
    )
    return None if seconds < 0 else seconds


def prefer(variant: str, code: str, form: int, work: int) -> bool:
    """Makes a variant that of one layout's matmuls in this process, unless one is forced.

    Args:
        form: 1 for rounded activations, or for plain weights in bfloat16; else 0.
        work: 0 for one row, 1 for few, 2 for many.

    Returns:
        False where this processor lacks it, or its bits are not the default's.
    """
    library = load()
    assert library is not None
    function = library.rooflax_prefer
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    return bool(function(variant.encode(), layout(code), form, work))


def cpuinfo(field: str) -> str | None:
    """A line of Linux about the first core, as its "model name" or "flags"."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return None
