"""Instructions of NVIDIA GPUs on four bytes at a time, for Mosaic GPU's kernels: dot products of
them, and looking them up.

Mosaic GPU has no operation for either, so each is a primitive with two meanings: one instruction in
a kernel on a GPU, and JAX's operations everywhere else, which is what interpretation runs. Imported
inside functions only, as `ops.mosaic` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic import gpu as _mgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

mgpu: Any = _mgpu


def dot4(a: jax.Array, b: jax.Array, total: jax.Array, *, signed: tuple[bool, bool]) -> jax.Array:
    """total + the sum of a's four bytes times b's, of int32 arrays of one layout.

    Args:
        signed: whether a's bytes are, and b's.
    """
    return _DOT4.bind(a, b, total, signed=signed)


def looked_up(table: tuple[int, int], index: jax.Array) -> jax.Array:
    """Four bytes of a table of eight, by the lower four nibbles of an index: three bits say which;
    the highest, that the sign of that byte fills it. A table whose bytes all have their highest bit
    set gives 255 then.

    Args:
        table: its first four bytes, and the others.
    """
    return _LOOKED_UP.bind(index, table=table)


def _dot4(a: jax.Array, b: jax.Array, total: jax.Array, *, signed: tuple[bool, bool]) -> jax.Array:
    for shift in (24, 16, 8, 0):
        total = total + _byte(a, shift, signed[0]) * _byte(b, shift, signed[1])
    return total


def _byte(x: jax.Array, shift: int, signed: bool) -> jax.Array:
    """The byte that lies `shift` bits below the highest one."""
    moved = x << shift
    return moved >> 24 if signed else (moved >> 24) & 0xFF


def _looked_up(index: jax.Array, *, table: tuple[int, int]) -> jax.Array:
    low, high = (jnp.int32(half) for half in table)
    found = jnp.zeros_like(index)
    for place in range(4):
        nibble = (index >> 4 * place) & 0xF
        byte = (jnp.where(nibble & 4 != 0, high, low) >> 8 * (nibble & 3)) & 0xFF
        filled = jnp.where(byte & 0x80 != 0, 0xFF, 0)
        found |= jnp.where(nibble & 8 != 0, filled, byte) << 8 * place
    return found


def _primitive(name: str, meaning: Callable[..., jax.Array], in_kernel: Callable) -> Primitive:
    """Elementwise on int32 arrays of one shape."""
    made = Primitive(name)
    made.def_impl(meaning)
    made.def_abstract_eval(lambda *avals, **_: avals[0])
    mlir.register_lowering(made, mlir.lower_fun(meaning, multiple_results=False))
    register = lowering.register_lowering_rule(made, mgpu.LoweringSemantics.Lane)
    register(lambda _, *arrays, **how: in_kernel(*arrays, **how))
    return made


def _instruction(text: str, *arrays: Any) -> Any:
    """One instruction on each register of fragmented arrays, whose elements may be vectors."""
    i32 = ir.IntegerType.get_signless(32)
    inputs = ",".join("r" for _ in arrays)

    def once(*values: Any) -> Any:
        return llvm.inline_asm(i32, values, text, f"=r,{inputs}", has_side_effects=False)

    def every(*registers: Any) -> Any:
        if not isinstance(registers[0].type, ir.VectorType):
            return once(*registers)
        found = registers[0]
        for place in range(ir.VectorType(found.type).shape[0]):
            values = (
                vector.extract(r, dynamic_position=[], static_position=[place]) for r in registers
            )
            one = once(*values)
            found = vector.insert(one, found, dynamic_position=[], static_position=[place])
        return found

    return arrays[0]._pointwise(every, *arrays[1:], output_is_signed=True)


def _dot4_in_kernel(a: Any, b: Any, total: Any, *, signed: tuple[bool, bool]) -> Any:
    kinds = ".".join("s32" if each else "u32" for each in signed)
    return _instruction(f"dp4a.{kinds} $0, $1, $2, $3;", a, b, total)


def _looked_up_in_kernel(index: Any, *, table: tuple[int, int]) -> Any:
    low, high = table
    return _instruction(f"prmt.b32 $0, {low}, {high}, $1;", index)


_DOT4 = _primitive("dot4", _dot4, _dot4_in_kernel)
_LOOKED_UP = _primitive("looked_up", _looked_up, _looked_up_in_kernel)
