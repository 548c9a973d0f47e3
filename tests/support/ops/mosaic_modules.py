"""A Mosaic GPU kernel's lowered module as plain operations, for `mosaic_run`."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

DYNAMIC = (-(1 << 63), -(1 << 31))
"""In place of an index that is an operand."""

DIALECT = "stable_mosaic_gpu."
ARITHMETIC = tuple(DIALECT + name for name in ("arith.", "vector.", "math.", "builtin."))


@dataclass(eq=False)
class Op:
    """An operation.

    Attributes:
        name: with what it assembles, if it does.
        types: of the operands. Values have numbers.
        results: with their types.
        regions: arguments of each, and its operations.
    """

    name: str
    attributes: dict[str, Any]
    operands: list[int]
    types: list[str]
    results: list[tuple[int, Any]]
    regions: list[tuple[list[int], list["Op"]]]

    def of_type(self, kind: str, values: list[Any]) -> list[Any]:
        """Those of its operands' values."""
        return [v for v, t in zip(values, self.types, strict=True) if t == kind]


@dataclass(frozen=True)
class Memref:
    """Elements of memory: `base` in bytes, the rest in elements."""

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    each: int

    def address(self, index: list[int]) -> int:
        at = sum(i * s for i, s in zip(index, self.strides, strict=False))
        return self.base + (self.offset + at) * self.each


def modules(function: Callable[..., Any], *arguments: Any) -> list[list[Op]]:
    """The kernels of a function lowered for CUDA."""
    return [_main(module) for module in _parsed(function, *arguments)]


def texts(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The same, as they are written."""
    return [str(module) for module in _parsed(function, *arguments)]


def _parsed(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    jitted = jax.jit(lambda *given: function(*given))  # a function of its own is traced anew
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    packed = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            packed.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    for each in packed:
        with mlir.make_ir_context() as context:
            mgpu.dialect.register_dialect(context)
            context.allow_unregistered_dialects = True
            yield ir.Module.parse(each)


def _main(module: Any) -> list[Op]:
    """Operations of its one function that has any."""
    numbers: dict[Any, int] = defaultdict(lambda: len(numbers))
    (main,) = (op for op in module.body if "func.func" in op.name and len(op.regions[0].blocks))
    return _read(main, numbers).regions[0][1]


def _read(op: Any, numbers: dict[Any, int]) -> Op:
    name = op.name.removeprefix(DIALECT)
    attributes = {key: _plain(op.attributes[key]) for key in op.attributes}
    regions = []
    for region in op.regions:
        for block in region:
            ops = [_read(inner, numbers) for inner in block if _matters(inner)]
            regions.append(([numbers[a] for a in block.arguments], ops))
    return Op(
        f"{name} {attributes.get('asm_string', '')}".strip(),
        attributes,
        [numbers[value] for value in op.operands],
        [str(value.type) for value in op.operands],
        [(numbers[value], _kind(value.type)) for value in op.results],
        regions,
    )


def _matters(op: Any) -> bool:
    """Whether it is more than arithmetic of numbers that are not computed, or a load of what nobody
    reads: JAX before 0.12 stores to shared memory by exchanging values."""
    if op.name.endswith(".load") and not any(True for result in op.results for _ in result.uses):
        return False
    if not op.name.startswith(ARITHMETIC) or "load" in op.name:
        return True
    return not all(str(value.type).startswith(("vector", "f", "bf")) for value in op.results)


def _plain(attribute: Any) -> Any:
    for kind in (ir.IntegerAttr, ir.StringAttr):
        if isinstance(attribute, kind):
            return kind(attribute).value
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseI32ArrayAttr):
        return list(attribute)
    return str(attribute)


def _kind(of: Any) -> Any:
    """A type: of a memref of numbers, what does not change; of all else, the name."""
    if not isinstance(of, ir.MemRefType) or "!" in str(of.element_type):
        return str(of)
    strides, _ = of.get_strides_and_offset()
    return Memref(0, 0, tuple(of.shape), tuple(strides), bytes_of(str(of.element_type)))


def bytes_of(kind: str) -> int:
    """Of a number, a vector of them or a pointer, by its type's name."""
    count = 1
    if found := re.fullmatch(r"vector<(\d+)x(\w+)>", kind):
        count, kind = int(found[1]), found[2]
    bits = re.match(r"(?:i|f|bf)(\d+)", kind)
    return count * (max(1, int(bits[1]) // 8) if bits else 8)
