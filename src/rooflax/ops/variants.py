"""Variants of the native kernels by the weights they multiply: measured once on a machine.

No variant is the fastest for every format on a processor. Of those that give the bits of the
default (csrc/matmul_ffi.cc says which), a model's own weights decide, for each of its formats and
each of WORKS. What was measured stays in the cache folder, one file for each processor, number of
threads and version.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from rooflax.errors import RequestError
from rooflax.files import only_writer, read_regular, replacing
from rooflax.folders import cache_folder
from rooflax.ops import native
from rooflax.ops.weights import Dense, Quantized, StoredOperand

WORKS = {"one row": 1, "few rows": 8, "many rows": 128}
"""Kinds of work, and the rows that they are measured with; few are up to 16."""
PIECES = (1 << 22, 1 << 22, 1 << 18)
"""Bytes of weights that are read at a time for each of WORKS."""
TIMED = 3
"""Pieces to a reading, the least of their times, after one that is not timed."""
TURNS, LEAST_TURNS = 9, 3
HOPELESS = 2.0
"""Times as slow as another: such a variant is not read again."""
MARGIN = 1.05
"""Ratio of the default's median to another variant's where that is taken: less may be noise."""
BUDGET_S = 0.14
LEAST_BYTES = 1 << 24
"""Bytes of an array of weights; smaller ones are not measured, as they stay in a cache."""
MOST_FILE_BYTES, MOST = 1 << 20, 1 << 24
"""Bytes of a table's file, and the largest size in it."""
AGAIN_S, AGAIN_BYTES = 3.0, 1 << 28
"""Limits where a table is taken again without a model: time, and bytes that are read."""
BROKEN = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    SyntaxError,
)  # fmt: skip
"""Errors that reading a file of any content may raise."""
TABLES = ("embed", "lm_head")
"""Weights that make logits."""


@dataclass(frozen=True)
class Layout:
    """Layout of a format's weights in their arrays: values, scales and sums.

    Attributes:
        code: as `StoredOperand.code`.
        quantizes: activations are rounded to int8.
        inner: inputs; 0 of a matrix, which is cut along them.
        arrays: of each its dtype, how many members of its first axis belong to one of the values',
            and the shape of such a member.
    """

    code: str
    quantizes: bool
    inner: int
    arrays: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def form(self) -> int:
        """As `native.prefer` takes it."""
        return int(self.quantizes or self.arrays[0][0] == "bfloat16")

    def steps(self) -> list[int]:
        """Bytes of each array that belong to one member of the values' first axis."""
        return [
            count * math.prod(member) * np.dtype(_numpy_name(dtype)).itemsize
            for dtype, count, member in self.arrays
        ]


@dataclass(frozen=True)
class Measured:
    """Measurements of a format.

    Attributes:
        seconds: of WORKS, as far as there was time, the medians by variant; none where there is
            only one.
    """

    layout: Layout
    seconds: Mapping[str, Mapping[str, float]]

    def variants(self) -> dict[str, str]:
        """The variant for each of WORKS."""
        default = native.instruction_set()
        return {work: fastest(self.seconds.get(work, {}), default) for work in WORKS}

    def prefer(self) -> None:
        """Makes them those of this process."""
        for work, variant in enumerate(self.variants().values()):
            native.prefer(variant, self.layout.code, self.layout.form, work)


@dataclass(frozen=True)
class Weights:
    """Weights in memory, of which pieces are read.

    Attributes:
        addresses: of each of the layout's arrays.
        length: members of the values' first axis that lie side by side.
    """

    layout: Layout
    addresses: tuple[int, ...]
    length: int

    @property
    def nbytes(self) -> int:
        return self.length * self.layout.steps()[0]

    def seconds(self, variant: str, work: str, turn: int) -> float | None:
        """One reading for one of WORKS, of other pieces each turn; or None, as
        `native.matmul_seconds`."""
        layout, steps = self.layout, self.layout.steps()
        wanted = PIECES[list(WORKS).index(work)] // steps[0]
        wanted = max(wanted, 1 if layout.inner else 64)
        count = TIMED + 1
        size = min(wanted, self.length // count)
        if size == 0:
            return None
        at = turn * count % (self.length // size - count + 1) * size
        outer = size if layout.code == "table" else size * 16
        inner, outer = (layout.inner, outer) if layout.inner else (size, layout.arrays[0][2][0])
        arrays = [
            (address + at * step, dtype, (size * each, *member), size * step)
            for address, step, (dtype, each, member) in zip(
                self.addresses, steps, layout.arrays, strict=True
            )
        ]
        return native.matmul_seconds(
            variant, layout.code, quantizes=layout.quantizes, arrays=arrays, count=count,
            shape=(WORKS[work], inner, outer),
        )  # fmt: skip


def prefer_fastest(weights: Any) -> None:
    """Takes the fastest variant for each format of a model's weights, measured if that is due.

    Args:
        weights: the model's tree, on one CPU.
    """
    if not native.is_ready() or not (formats := formats_of(weights)):
        return
    try:
        path = table_path()
    except RuntimeError:  # this system knows no home of the user
        return
    table = read_table(path)
    if any(name not in table or table[name].seconds.keys() != WORKS.keys() for name in formats):
        # Where another process measures, the default until then.
        with contextlib.suppress(RequestError), only_writer(path, makes_folders=True):
            table = measure(formats, read_table(path), BUDGET_S)
            write_table(path, table)
    for name in reversed(formats):  # of formats that share kernels the one of most bytes decides
        if name in table:
            table[name].prefer()


def measure_again() -> dict[str, Measured]:
    """Takes the table of this machine again, over memory of its own in place of a model's weights.

    Raises:
        RequestError: another process measures.
    """
    path = table_path()
    table = read_table(path)
    if not table:
        return table
    filled = np.full(AGAIN_BYTES, 0x11, np.uint8)  # a harmless number in every dtype
    formats = {
        name: Weights(
            entry.layout, (filled.ctypes.data,) * 3, len(filled) // max(entry.layout.steps())
        )
        for name, entry in table.items()
    }
    with only_writer(path, makes_folders=True):
        table |= measure(formats, {}, AGAIN_S)
        write_table(path, table)
    return table


def formats_of(weights: Any) -> dict[str, Weights]:
    """The largest weight of each format that is worth measuring, those of most bytes first."""
    largest: dict[str, Weights] = {}
    leaves = jax.tree_util.tree_leaves_with_path(
        weights, is_leaf=lambda leaf: isinstance(leaf, StoredOperand)
    )
    for path, leaf in leaves:
        if leaf.nbytes < LEAST_BYTES or leaf.ndim < 2:
            continue
        operand = leaf if isinstance(leaf, StoredOperand) else _plain(path, leaf)
        name = operand.format if isinstance(operand, Quantized) else f"{operand.code} {leaf.dtype}"
        lying = _lying(operand)
        if lying is not None and (name not in largest or lying.nbytes > largest[name].nbytes):
            largest[name] = lying
    return dict(sorted(largest.items(), key=lambda item: -item[1].nbytes))


def _plain(path: tuple[Any, ...], array: jax.Array) -> Dense:
    """The operand of an array: a table, or layers of matrices as one matrix."""
    if getattr(path[0], "key", None) in TABLES:
        return Dense(array, array.shape[1:], array.shape[:1], table=True)
    return Dense(array, (math.prod(array.shape[:-1]),), array.shape[-1:])


def _lying(operand: StoredOperand) -> Weights | None:
    """Addresses of weights; None where they are on several devices."""
    arrays, axis = operand.arrays, len(operand.stack)
    values = arrays[0]
    if len(values.devices()) > 1 or operand.packing == "matrix":
        return None
    is_matrix = operand.code == "matrix"
    axis = values.ndim - 2 if is_matrix else axis  # members of a stack lie one behind the other
    first = values.shape[axis]
    shapes = [array.shape[axis:] if array.size else (0,) for array in arrays]
    layout = Layout(
        operand.code,
        operand.quantizes_activations,
        0 if is_matrix else operand.inner,
        tuple(
            (str(array.dtype), shape[0] // first, tuple(shape[1:]))
            for array, shape in zip(arrays, shapes, strict=True)
        ),
    )
    addresses = tuple(array.unsafe_buffer_pointer() if array.size else 0 for array in arrays)
    return Weights(layout, addresses, math.prod(values.shape[: axis + 1]))


def measure(
    weights: Mapping[str, Weights], known: Mapping[str, Measured], budget_s: float
) -> dict[str, Measured]:
    """The table with what it lacked: median seconds of each variant, interleaved.

    Args:
        budget_s: for all of it; what is left then stays unknown, but for the first.
    """
    ends, longest = time.perf_counter() + budget_s, 0.0
    table = dict(known)
    todo = [
        (name, work)
        for work in WORKS
        for name in weights
        if name not in known or work not in known[name].seconds
    ]
    for index, (name, work) in enumerate(todo):
        began = time.perf_counter()
        if index > 0 and began + longest > ends:
            break
        share_s = (ends - began) / (len(todo) - index)
        medians = _medians(weights[name], work, began + share_s)
        seconds = table[name].seconds if name in table else {}
        table[name] = Measured(weights[name].layout, {**seconds, work: medians})
        longest = max(longest, time.perf_counter() - began)
    return table


def _medians(weights: Weights, work: str, enough: float) -> dict[str, float]:
    """Median seconds by variant, of as many readings as there is time for until `enough`: of the
    default itself, of the others as ratios to its in the same turn."""
    default = native.instruction_set()
    readings: dict[str, list[float]] = {}
    running = [name for name in native.INSTRUCTION_SETS if name != "generic"]
    for turn in range(TURNS):
        for index, name in enumerate(running[:: -1 if turn % 2 else 1]):
            took = weights.seconds(name, work, turn * len(native.INSTRUCTION_SETS) + index)
            if took is not None:
                readings.setdefault(name, []).append(took)
        best = min(map(min, readings.values()), default=0.0)
        running = [name for name, each in readings.items() if min(each) < HOPELESS * best]
        if len(readings) < 2 or default not in readings:
            return {}
        if turn + 1 >= LEAST_TURNS and time.perf_counter() > enough:
            break
    default_s = readings[default]
    return {
        name: median(default_s) * median(a / b for a, b in zip(each, default_s, strict=False))
        for name, each in readings.items()
    }


def fastest(seconds: Mapping[str, float], default: str) -> str:
    """The variant that is faster than the default by more than MARGIN, if there is one."""
    best = min(seconds, key=seconds.__getitem__, default=default)
    return best if best in seconds and seconds[best] * MARGIN < seconds.get(default, 0) else default


# The file


def machine() -> dict[str, Any]:
    """The machine that a table holds for."""
    return {
        "processor": native.cpuinfo("model name") or platform.processor() or platform.machine(),
        "flags": native.cpuinfo("flags") or "",
        "threads": native.num_threads(),
        "version": [importlib.metadata.version("rooflax"), native.KERNELS_VERSION],
        "default": native.instruction_set(),
    }


def table_path() -> Path:
    """The file of this machine's table."""
    name = hashlib.sha256(json.dumps(machine()).encode()).hexdigest()[:16]
    return cache_folder() / "variants" / f"{name}.json"


def read_table(path: Path) -> dict[str, Measured]:
    """Entries of a file for this machine: none where it is broken, missing, or another's."""
    try:
        document = json.loads(read_regular(path, MOST_FILE_BYTES))
        if document["machine"] != machine():
            return {}
        return {name: _entry(entry) for name, entry in document["formats"].items()}
    except BROKEN:
        return {}


def write_table(path: Path, table: Mapping[str, Measured]) -> None:
    """Replaces a table's file whole; without a folder to write to it is left."""
    document = {
        "machine": machine(),
        "formats": {name: asdict(entry) for name, entry in table.items()},
    }
    with contextlib.suppress(OSError), replacing(path, "utf-8") as file:
        json.dump(document, file, indent=1)


def _entry(stored: Mapping[str, Any]) -> Measured:
    """One from JSON.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """
    stored_layout, seconds = stored["layout"], stored["seconds"]
    arrays = tuple(
        (str(dtype), int(count), tuple(int(size) for size in member))
        for dtype, count, member in stored_layout["arrays"]
    )
    layout = Layout(
        str(stored_layout["code"]),
        bool(stored_layout["quantizes"]),
        int(stored_layout["inner"]),
        arrays,
    )
    native.layout(layout.code)
    steps = layout.steps()
    sizes = (layout.inner, *steps, steps[0] - 1)
    fits = len(arrays) == 3 and arrays[2][0] == "int32" and set(seconds) <= set(WORKS)
    fits = fits and (layout.inner > 0 or len(arrays[0][2]) == 1)
    if not fits or not 0 <= min(sizes) <= max(sizes) <= MOST:
        raise ValueError("another form")
    return Measured(layout, {work: _readings(each.items()) for work, each in seconds.items()})


def _readings(items: Iterable[tuple[str, Any]]) -> dict[str, float]:
    readings = {name: float(took) for name, took in items}
    if not all(0 < took < math.inf for took in readings.values()):
        raise ValueError("no seconds")
    if not set(readings) <= set(native.INSTRUCTION_SETS):
        raise ValueError("no variant")
    return readings


def _numpy_name(dtype: str) -> str:
    """A dtype's name for NumPy, of two bytes for bfloat16."""
    return "uint16" if dtype == "bfloat16" else dtype
