"""Integers and references of a Mosaic GPU kernel's lowered module, for `mosaic_run`.

What is no integer is None, and so is all that is computed from it. One thread of a warp runs, the
one that is elected; what it alone has, and the others do not, is `Elected`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from tests.support.ops.mosaic_modules import DYNAMIC, Memref, Op, bytes_of

SHARED, PRIVATE, GLOBAL = 1 << 10, 1 << 32, 1 << 40
"""Where memory of each kind begins; a kernel's arguments are GLOBAL bytes apart."""


class Elected(int):
    """A number of the elected thread; the others have 0."""


def _chosen(which: int, yes: int, no: int) -> int:
    if isinstance(which, Elected) and no == 0:
        return Elected(yes if which else no)
    return yes if which else no


def _both(a: int, b: int) -> int:
    elected = isinstance(a, Elected) or isinstance(b, Elected)
    return Elected(a & b) if elected else a & b


def _named(names: str, meaning: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), meaning)


ARITHMETIC = (
    _named("addi add", operator.add)
    | _named("subi sub", operator.sub)
    | _named("muli mul", operator.mul)
    | _named("divui divsi udiv sdiv", lambda a, b: int(a / b))
    | _named("remui remsi urem srem", lambda a, b: int(math.fmod(a, b)))
    | _named("andi and", _both)
    | _named("ori or", operator.or_)
    | _named("xori xor", operator.xor)
    | _named("shli shl", operator.lshift)
    | _named("shrui shrsi lshr ashr", operator.rshift)
    | _named("minsi minui", min)
    | _named("maxsi maxui", max)
    | _named("index_cast index_castui extui extsi trunci ptrtoint inttoptr bitcast", lambda a: a)
    | _named("select", _chosen)
    | _named("shfl.sync", lambda mask, value, lane, clamp: value)
)
"""Of numbers that are not negative, but for sums and comparisons."""
COMPARISONS = (
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip


def value_of(op: Op, given: list[Any], block: list[int], thread: int) -> list[Any]:
    """Results of an operation that neither waits nor loads.

    Args:
        given: its operands.
        block: threads of the program along its axes.
        thread: which of them runs.
    """
    what = op.name.partition(".")[2]
    kind = op.results[0][1]
    if what in ("constant", "mlir.constant"):
        value = op.attributes["value"]
        return [int(value) % 2 if kind == "i1" else value if isinstance(value, int) else None]
    if what in ("thread_id", "block_dim", "block_id"):
        axis = "xyz".index(op.attributes["dimension"].rstrip(">")[-1])
        x, y, _ = block
        place = thread % x, thread // x % y, thread // x // y
        return [{"thread_id": place, "block_dim": block, "block_id": (0, 0, 0)}[what][axis]]
    if what == "elect.sync":
        return [Elected(1)]
    if what == "unrealized_conversion_cast":
        place = op.attributes.get("mosaic_gpu.from_kernel_arg_idx")
        if place is not None:
            return [at(kind, (1 + place) * GLOBAL)]
        return [given[0] if len(given) == 1 else None]
    if what == "extractvalue":
        return [_field(given[0], *op.attributes["position"])]
    if op.name.startswith("memref.") or what == "dynamic_shared_memory":
        return _reference(op, what, given)
    if None in given:
        return [None]
    if what == "getelementptr":
        index, *more = op.attributes["rawConstantIndices"]
        index = given[1] if index in DYNAMIC else index
        return [None if more else given[0] + index * bytes_of(op.attributes["elem_type"])]
    if what == "cmpi":
        return [int(COMPARISONS[op.attributes["predicate"]](*given))]
    return [ARITHMETIC[what](*given)] if what in ARITHMETIC else []


def at(kind: Any, address: int) -> Any:
    """A reference, or a pointer."""
    return Memref(address, 0, kind.shape, kind.strides, kind.each) if _is_memref(kind) else address


def _is_memref(kind: Any) -> bool:
    return isinstance(kind, Memref)


def _field(struct: Any, part: int, axis: int = 0) -> int | None:
    """Of a reference as LLVM has it."""
    if not isinstance(struct, Memref):
        return None
    if part < 2:
        return struct.base
    return struct.offset if part == 2 else (struct.shape, struct.strides)[part - 3][axis]


def _reference(op: Op, what: str, given: list[Any]) -> list[Any]:
    if what == "dynamic_shared_memory":
        return [Memref(SHARED, 0, (), (), 1)]
    kind, (source, *more) = op.results[0][1], given
    if what == "view":
        return [at(kind, source.base + more[0])]
    if what == "extract_strided_metadata":
        return [source, source.offset, *source.shape, *source.strides]
    if not isinstance(source, Memref):
        return [None]
    if what == "extract_aligned_pointer_as_index":
        return [source.base]
    offset = source.offset
    if what in ("subview", "reinterpret_cast"):
        rest = iter(more)
        index = [next(rest) if i in DYNAMIC else i for i in op.attributes["static_offsets"]]
        if None in index:
            return [None]
        moved = sum(i * s for i, s in zip(index, source.strides, strict=False))
        offset = offset + moved if what == "subview" else index[0]
    if not _is_memref(kind):
        return [source]
    return [Memref(source.base, offset, kind.shape, kind.strides, kind.each)]
