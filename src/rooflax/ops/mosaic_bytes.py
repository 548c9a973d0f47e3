"""Instructions of NVIDIA GPUs on four bytes at a time, for Mosaic GPU's kernels: dot products of
them, looking them up, what they are as e4m3, and what rounds numbers and joins them to bytes.

Mosaic GPU has no operation for any, so each is a primitive with two meanings: instructions in a
kernel on a GPU, and JAX's operations everywhere else, which is what interpretation runs. Imported
inside functions only, as `ops.mosaic` is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic import gpu as _mgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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


def e4m3(packed: jax.Array, place: int) -> jax.Array:
    """Float32 numbers of the e4m3 codes in one of an int32's bytes, the lowest being 0."""
    pair = _E4M3_PAIR.bind(packed, upper=place > 1)
    return _WIDENED.bind(pair, upper=bool(place % 2))


def nearest(x: jax.Array) -> jax.Array:
    """Float32 numbers rounded to the nearest of 16 bits, halves to even; NaN to 0."""
    return _NEAREST.bind(x)


def joined(x: jax.Array, first: int = 0, count: int = 4) -> jax.Array:
    """Sums of some of each four neighbours, of int32 [32, 16] in `mosaic.words_layout`, where one
    thread has them: [32, 4]."""
    return _JOINED.bind(x, first=first, count=count)


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
    word = jnp.zeros_like(index)
    for place in range(4):
        nibble = (index >> 4 * place) & 0xF
        byte = (jnp.where(nibble & 4 != 0, high, low) >> 8 * (nibble & 3)) & 0xFF
        filled = jnp.where(byte & 0x80 != 0, 0xFF, 0)
        word |= jnp.where(nibble & 8 != 0, filled, byte) << 8 * place
    return word


def _e4m3_pair(packed: jax.Array, *, upper: bool) -> jax.Array:
    """Two e4m3 numbers of a half word as float16, which holds them all."""
    codes = jax.lax.bitcast_convert_type(packed, jnp.float8_e4m3fn)
    wide = codes[..., 2 * upper : 2 * upper + 2].astype(jnp.float16)
    return jax.lax.bitcast_convert_type(wide, jnp.int32)


def _widened(pair: jax.Array, *, upper: bool) -> jax.Array:
    return jax.lax.bitcast_convert_type(pair, jnp.float16)[..., int(upper)].astype(jnp.float32)


def _nearest(x: jax.Array) -> jax.Array:
    bounded = jnp.clip(jnp.round(x), -(2.0**15), 2.0**15 - 1)
    return jnp.where(x == x, bounded, 0.0).astype(jnp.int32)


def _joined(x: jax.Array, *, first: int, count: int) -> jax.Array:
    return x.reshape(len(x), -1, 4)[:, :, first : first + count].sum(axis=2)


def primitive(
    name: str,
    meaning: Callable[..., jax.Array],
    in_kernel: Callable,
    shape: Callable[..., Any] = lambda *avals, **_: avals[0],
) -> Primitive:
    """A function of arrays whose lowering is a kernel's own; elementwise unless `shape` says more.

    Args:
        meaning: what it computes elsewhere.
    """
    made = Primitive(name)
    made.def_impl(meaning)
    made.def_abstract_eval(shape)
    mlir.register_lowering(made, mlir.lower_fun(meaning, multiple_results=False))
    register = lowering.register_lowering_rule(made, mgpu.LoweringSemantics.Lane)
    register(lambda _, *arrays, **options: in_kernel(*arrays, **options))
    return made


def _instruction(text: str, *arrays: Any, kind: str = "r", result: str = "r") -> Any:
    """One instruction on each register of fragmented arrays, whose elements may be vectors.

    Args:
        kind: of registers that it takes, as PTX names them: r for int32, f for float32.
        result: of those that it gives.
    """
    made = ir.IntegerType.get_signless(32) if result == "r" else ir.F32Type.get()
    inputs = ",".join(kind for _ in arrays)

    def once(*values: Any) -> Any:
        return llvm.inline_asm(made, values, text, f"={result},{inputs}", has_side_effects=False)

    def every(*registers: Any) -> Any:
        if not isinstance(registers[0].type, ir.VectorType):
            return once(*registers)
        (count,) = ir.VectorType(registers[0].type).shape
        elements = [once(*(element(r, place) for r in registers)) for place in range(count)]
        return vector.from_elements(ir.VectorType.get((count,), made), elements)

    signed = True if result == "r" else None
    return arrays[0]._pointwise(every, *arrays[1:], output_is_signed=signed)


def element(register: Any, place: int) -> Any:
    """One of a register's values."""
    return vector.extract(register, dynamic_position=[], static_position=[place])


def _dot4_in_kernel(a: Any, b: Any, total: Any, *, signed: tuple[bool, bool]) -> Any:
    kinds = ".".join("s32" if each else "u32" for each in signed)
    return _instruction(f"dp4a.{kinds} $0, $1, $2, $3;", a, b, total)


def _looked_up_in_kernel(index: Any, *, table: tuple[int, int]) -> Any:
    low, high = table
    return _instruction(f"prmt.b32 $0, {low}, {high}, $1;", index)


def _e4m3_pair_in_kernel(packed: Any, *, upper: bool) -> Any:
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, %s; }"
    return _instruction(text % ("high" if upper else "low"), packed)


def _widened_in_kernel(pair: Any, *, upper: bool) -> Any:
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, %s; }"
    return _instruction(text % ("high" if upper else "low"), pair, result="f")


def _nearest_in_kernel(x: Any) -> Any:
    text = "{ .reg .s16 t; cvt.rni.s16.f32 t, $1; cvt.s32.s16 $0, t; }"
    return _instruction(text, x, kind="f")


def _joined_in_kernel(x: Any, *, first: int, count: int) -> Any:
    from rooflax.ops.mosaic import words_layout

    shape, layout = (x.shape[0], x.shape[1] // 4), words_layout(x.shape[1] // 4).to_mgpu()
    (register,) = x.registers.flat
    total = element(register, first)
    for place in range(first + 1, first + count):
        total = arith.addi(total, element(register, place))
    registers = np.empty(layout.registers_shape(shape), object)
    registers.flat[0] = vector.broadcast(ir.VectorType.get((1,), total.type), total)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


_DOT4 = primitive("dot4", _dot4, _dot4_in_kernel)
_LOOKED_UP = primitive("looked_up", _looked_up, _looked_up_in_kernel)
_E4M3_PAIR = primitive("e4m3_pair", _e4m3_pair, _e4m3_pair_in_kernel)
_WIDENED = primitive(
    "widened",
    _widened,
    _widened_in_kernel,
    lambda pair, **_: pair.update(dtype=jnp.dtype(jnp.float32)),
)
_NEAREST = primitive(
    "nearest", _nearest, _nearest_in_kernel, lambda x: x.update(dtype=jnp.dtype(jnp.int32))
)
_JOINED = primitive(
    "joined",
    _joined,
    _joined_in_kernel,
    lambda x, **_: x.update(shape=(x.shape[0], x.shape[1] // 4)),
)
