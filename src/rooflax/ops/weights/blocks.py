"""The block types of GGUF files at their own bits, one class each.

With q the codes of a weight [in, out], g = k // 32 and h = k // 16:

    q4_1     w = d[g] q + m[g],                       q in 0..15, d and m float16
    q5_0     w = d[g] (q - 16),                       q in 0..31
    q5_1     w = d[g] q + m[g],                       q in 0..31
    q2_k     w = (d s[h]) q - (e m[h]),               q in 0..3, s and m in 0..15
    q3_k     w = (d s[h]) (q - 4),                    q in 0..7, s in -32..31
    q4_k     w = (d s[g]) q - (e m[g]),               q in 0..15, s and m in 0..63
    q5_k     w = (d s[g]) q - (e m[g]),               q in 0..31, s and m in 0..63
    q6_k     w = (d s[h]) (q - 32),                   q in 0..63, s in -128..127
    int6     w = d[g] (q - 32),                       q in 0..63
    iq4_nl   w = d[g] IQ4[q],                         q in 0..15
    iq4_xs   w = (d s[g]) IQ4[q],                     q in 0..15, s in -32..31
    int4-z64, int4-z128
             w = d q - d z,                           q in 0..15, z in 0..255
    nvfp4    w = s[h] e2m1[q],                        q in 0..15, s float32

d and e of the k types and of iq4_xs are float16 that 256 inputs share. Formats of these names round
activations to int8 in groups of 32; with "-a16" behind the name they are kept.

A group's codes are packed as csrc/impl_blocks.h says, in as many lines of 16 x 4 bytes as a code
has bits. The scales of a group are one number, its fields side by side from the lowest bit on: a
float16; d and m as 32 bits; or 64 bits: d and e, then two bytes, of s and m or of two halves.

int6, int4-z64 and int4-z128 are no types of GGUF files. The latter two are of AWQ and GPTQ: 64 or
128 inputs share a float16 scale and a zero point, and the kernels of q4_k read them.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and gguf-py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops import native
from rooflax.ops.format_names import GROUP, PANEL
from rooflax.ops.weights import int6, iq4
from rooflax.ops.weights.formats import E2M1_VALUES, looked_up
from rooflax.ops.weights.quantized import (
    Encoded,
    Quantized,
    both_halves,
    by_panel,
    namespace,
    split_blocks,
)

SUPER = 8
"""Groups that share float16s in a file."""


class Block(Quantized):
    """A block type with scales of a group's own.

    Attributes:
        bits: of a code.
        offset: what is taken from a code before it is scaled.
        parts: of a group, each with scales of its own.
    """

    bits: ClassVar[int]
    offset: ClassVar[int] = 0
    parts: ClassVar[int] = 1
    has_matrix = False

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls) and "names" not in vars(cls):  # a type of GGUF files
            cls.names = {cls.code: True, f"{cls.code}-a16": False}
            cls.blocks = {cls.code.upper(): cls.code}
        super().__init_subclass__()

    # Of a format

    @classmethod
    def like(
        cls, inner: int, outer: int, stack: tuple[int, ...] = ()
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        panels, groups = -(-outer // PANEL), inner // GROUP
        values = (*stack, panels, groups, cls.bits, PANEL, 4)
        return (
            jax.ShapeDtypeStruct(values, np.uint8),
            jax.ShapeDtypeStruct((*stack, panels, *cls.scale_shape(groups)), cls.stored_type()),
            jax.ShapeDtypeStruct((0,), np.int32),
        )

    @classmethod
    def scale_shape(cls, groups: int) -> tuple[int, ...]:
        """Stored shape of a panel's scales."""
        return groups, PANEL

    @classmethod
    def stored_type(cls) -> Any:
        return cls.scale_type

    @classmethod
    def unpack_scales(cls, scales: np.ndarray) -> np.ndarray:
        """The inverse of `pack_scales`, of a host array [..., 16]."""
        return scales

    @classmethod
    def factors_of(cls, scales: Any) -> tuple[Any, Any]:
        """Scales and what is taken away, each float32 [..., parts]; None where nothing is.

        Args:
            scales: one number a group, on the host.
        """
        raise NotImplementedError

    @classmethod
    def stored_factors(cls, scales: Any) -> tuple[Any, Any]:
        """`factors_of` of stored scales, each [..., groups, 16, parts]."""
        return cls.factors_of(scales)

    @classmethod
    def weighted(cls, codes: Any, factors: tuple[Any, Any]) -> Any:
        """Codes [..., 32] and their factors [..., parts] as numbers [..., 32] in float32."""
        scale, minimum = factors
        q = cls.decoded(codes.reshape(*codes.shape[:-1], cls.parts, GROUP // cls.parts))
        numbers = scale[..., None] * q
        if minimum is not None:
            numbers = numbers - minimum[..., None]
        return numbers.reshape(codes.shape)

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return codes.astype(np.float32) - np.float32(cls.offset)

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks that are a scale, with five bits the fifth of each code, and the other four."""
        scales, body = split_blocks(blocks, np.dtype(cls.scale_type).str)
        if cls.bits == 4:
            return both_halves(body), scales
        fifth = np.unpackbits(body[..., :4], axis=-1, bitorder="little")
        return both_halves(body[..., 4:]) | fifth << 4, scales

    @classmethod
    def scaled(cls, codes: Any, scales: Any, axis: int = -1) -> Any:
        return cls.weighted(codes, cls.factors_of(scales))

    @classmethod
    def are_finite(cls, scales: np.ndarray) -> np.ndarray:
        scale, minimum = cls.factors_of(scales)
        is_finite = np.isfinite(scale).all(axis=-1)
        return is_finite if minimum is None else is_finite & np.isfinite(minimum).all(axis=-1)

    @classmethod
    def pack_codes(cls, codes: np.ndarray) -> np.ndarray:
        """Codes [n, in] of whole panels as [n / 16, groups, bits, 16, 4]."""
        q = by_panel(codes.reshape(len(codes), -1, GROUP))  # [panels, groups, 8, 16, 4]
        lines, low = [], cls.bits // 4 * 4
        if low:  # quads 0 to 3 in the low halves
            lines.append((q[:, :, :4] & 15) | (q[:, :, 4:] & 15) << 4)
        rest = q >> low if cls.bits > low else q
        for width in (2, 1):
            if (cls.bits - low) & width:
                planes = (rest & (2**width - 1)).reshape(*q.shape[:2], width, 8 // width, PANEL, 4)
                shifts = np.arange(8 // width, dtype=np.uint8)[:, None, None] * width
                lines.append(np.bitwise_or.reduce(planes << shifts, axis=3))
                rest = rest >> width
        return np.concatenate(lines, axis=2)

    @classmethod
    def unpack_codes(cls, values: Any) -> Any:
        """[..., groups, bits, lanes, 4] as [..., lanes, groups, 32]: `pack_codes` undone."""
        xp = namespace(values)
        at, codes, shift = 0, 0, cls.bits // 4 * 4
        if shift:
            nibbles = values[..., :4, :, :]
            codes, at = xp.concatenate([nibbles & 15, nibbles >> 4], axis=-3), 4
        for width in (2, 1):
            if (cls.bits - cls.bits // 4 * 4) & width:
                planes = values[..., at : at + width, None, :, :]
                shifts = np.arange(0, 8, width, dtype=np.uint8)
                shifts = np.expand_dims(shifts, (*range(planes.ndim - 3), -2, -1))
                bits = (planes >> shifts) & np.uint8(2**width - 1)
                bits = bits.reshape(*values.shape[:-3], 8, *values.shape[-2:])
                codes, at, shift = codes | bits << np.uint8(shift), at + width, shift + width
        by_output = xp.moveaxis(codes, -2, -4)  # [..., lanes, groups, 8, 4]
        return by_output.reshape(*by_output.shape[:-2], GROUP)

    # As a weight

    def numbers(self) -> Float[Array, "*stack in out"]:
        codes = self.unpack_codes(self.values)
        factors = [
            None if factor is None else namespace(factor).moveaxis(factor, -2, -3)
            for factor in self.stored_factors(self.scales)
        ]
        numbers = self.weighted(codes, (factors[0], factors[1]))
        lead = self.stack
        numbers = numbers.reshape(*lead, numbers.shape[len(lead)] * PANEL, -1)
        return numbers[..., : self.outer, :].swapaxes(-1, -2)

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n in"]:
        ids = jnp.clip(ids, 0, self.outer - 1)
        panel, lane = ids // PANEL, ids % PANEL
        values = self.values.at[panel, :, :, lane].get(mode="promise_in_bounds")
        codes = self.unpack_codes(values[..., None, :])
        scales = self.scales.at[panel].get(mode="promise_in_bounds")
        packed = jnp.take_along_axis(scales, lane.reshape(-1, *(1,) * (scales.ndim - 1)), axis=-1)
        scale, minimum = self.stored_factors(packed)
        factors = scale[..., 0, :], None if minimum is None else minimum[..., 0, :]
        return self.weighted(codes[:, 0], factors).reshape(*ids.shape, self.inner)

    def unpacked(self) -> tuple[np.ndarray, np.ndarray]:
        codes = self.unpack_codes(np.asarray(self.values))
        scales = self.unpack_scales(np.asarray(self.scales))
        scales = scales.swapaxes(-1, -2)  # [..., panels, 16, groups]
        return tuple(
            array.reshape(*self.stack, -1, last)[..., : self.outer, :]
            for array, last in ((codes, self.inner), (scales, scales.shape[-1]))
        )  # type: ignore[return-value]


class Halves(Block):
    """Types with a float16 scale."""

    scale_type = np.float16

    @classmethod
    def factors_of(cls, scales: Any) -> tuple[Any, Any]:
        return scales[..., None].astype(np.float32), None


class Pairs(Block):
    """Types with a float16 scale and a float16 that is added, as 32 bits."""

    scale_type = np.uint32

    @classmethod
    def factors_of(cls, scales: Any) -> tuple[Any, Any]:
        return _half(scales)[..., None], -_half(scales >> 16)[..., None]


class Supers(Block):
    """Types whose float16s are shared, with two bytes of a group's own, as 64 bits.

    They are stored as words of 32 bits [supers, 1 + groups of a super / 2, 16]: a super's float16s,
    then the bytes of two groups each.
    """

    scale_type = np.uint64

    @classmethod
    def fits(cls, inner: int) -> bool:
        return inner % (2 * GROUP) == 0

    @classmethod
    def scale_shape(cls, groups: int) -> tuple[int, ...]:
        shared = max(n for n in (2, 4, SUPER) if groups % n == 0)
        return groups // shared, 1 + shared // 2, PANEL

    @classmethod
    def stored_type(cls) -> Any:
        return np.uint32

    @classmethod
    def pack_scales(cls, scales: np.ndarray) -> np.ndarray:
        supers, lines, _ = cls.scale_shape(scales.shape[-2])
        by_super = scales.reshape(-1, supers, 2 * (lines - 1), PANEL)
        shared = (by_super & 0xFFFFFFFF).astype(np.uint32)
        if (shared != shared[:, :, :1]).any():
            raise ValueError("groups of one block have other scales")
        subs = (by_super >> 32).astype(np.uint32)
        return np.concatenate([shared[:, :, :1], subs[:, :, ::2] | subs[:, :, 1::2] << 16], axis=2)

    @classmethod
    def unpack_scales(cls, scales: np.ndarray) -> np.ndarray:
        shared, subs = cls._fields(scales)
        both = shared.astype(np.uint64) | subs.astype(np.uint64) << np.uint64(32)
        return both.reshape(*scales.shape[:-3], -1, PANEL)

    @staticmethod
    def _fields(scales: Any) -> tuple[Any, Any]:
        """Float16s [..., supers, 1, 16] and bytes [..., supers, groups, 16] of stored scales."""
        words = scales[..., 1:, None, :]
        subs = namespace(words).concatenate([words & 0xFFFF, words >> 16], axis=-2)
        return scales[..., :1, :], subs.reshape(*subs.shape[:-3], -1, subs.shape[-1])

    @classmethod
    def stored_factors(cls, scales: Any) -> tuple[Any, Any]:
        shared, subs = cls._fields(scales)

        def by_group(factor: Any) -> Any:
            return factor.reshape(*factor.shape[:-4], -1, *factor.shape[-2:])

        scale, minimum = cls.products(_half(shared), _half(shared >> 16), subs & 255, subs >> 8)
        return by_group(scale), None if minimum is None else by_group(minimum)

    @classmethod
    def factors_of(cls, scales: Any) -> tuple[Any, Any]:
        if scales.dtype == np.uint32:  # as they are stored
            return cls.stored_factors(scales)
        shared = (scales & 0xFFFFFFFF).astype(np.uint32)
        subs = (scales >> 32).astype(np.uint32)
        return cls.products(_half(shared), _half(shared >> 16), subs & 255, subs >> 8)

    @classmethod
    def products(cls, scale: Any, minimum: Any, first: Any, second: Any) -> tuple[Any, Any]:
        """The factors [..., parts] of both shared numbers and of a group's two bytes."""
        raise NotImplementedError

    @classmethod
    def signed(cls, scale: Any, *subs: Any) -> Any:
        """A shared number times bytes that are signed."""
        xp = namespace(subs[0])
        numbers = [(byte.astype(np.int32) ^ 128) - 128 for byte in subs]
        return xp.stack([scale * number.astype(np.float32) for number in numbers], axis=-1)


class Q4K(Supers):
    """Four bits, a scale and a minimum of six bits per group."""

    code, bits = "q4_k", 4

    @classmethod
    def products(cls, scale: Any, minimum: Any, first: Any, second: Any) -> tuple[Any, Any]:
        factors = (scale * first.astype(np.float32), minimum * second.astype(np.float32))
        return factors[0][..., None], factors[1][..., None]

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = _planes(blocks[..., 16 + cls.bits % 4 * 32 :], 32, 4)
        if cls.bits == 5:
            codes |= _planes(blocks[..., 16:48], 32, 1) << 4
        six = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4)
        low, high, both = six[..., 0, :], six[..., 1, :], six[..., 2, :]
        scales = np.concatenate([low & 63, (both & 15) | (low >> 2 & 48)], axis=-1)
        minimums = np.concatenate([high & 63, (both >> 4) | (high >> 2 & 48)], axis=-1)
        return _by_group(codes, _shared(blocks[..., :4]), scales, minimums)


class Q5K(Q4K):
    """Five bits, as Q4_K."""

    code, bits = "q5_k", 5


class Zeros64(Q4K):
    """Four bits, a float16 scale and a zero point per 64 inputs: d (q - z), exactly.

    As Q4_K, whose d and e are the scale here, and whose bytes are 1 and z.
    """

    code = "int4-z64"
    names = MappingProxyType({"w4a16-z64": False})
    blocks = MappingProxyType({})
    shared: ClassVar[int] = 2
    """Groups that share the scale and the zero point."""

    @classmethod
    def fits(cls, inner: int) -> bool:
        return inner % (cls.shared * GROUP) == 0

    @classmethod
    def scale_shape(cls, groups: int) -> tuple[int, ...]:
        return groups // cls.shared, 1 + cls.shared // 2, PANEL

    @staticmethod
    def joined_scales(scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Scales as `pack` takes them, of float16 and of zero points."""
        shared = scales.view(np.uint16).astype(np.uint64)
        subs = np.uint64(1) | zeros.astype(np.uint64) << np.uint64(8)
        return shared | shared << np.uint64(16) | subs << np.uint64(32)


class Zeros128(Zeros64):
    """As `Zeros64`, per 128 inputs."""

    code, shared = "int4-z128", 4
    names = MappingProxyType({"w4a16-z128": False})


class Nvfp4(Block):
    """e2m1 with a float32 scale per sixteen inputs, of checkpoints alone.

    The scales of a group's halves are 64 bits, stored as two words.
    """

    code, bits, parts = "nvfp4", 4, 2
    names = MappingProxyType({"nvfp4-a16": False})
    scale_type = np.uint64

    @staticmethod
    def joined_scales(scales: np.ndarray) -> np.ndarray:
        """Scales as `pack` takes them, of float32 [out, in / 16]."""
        return np.ascontiguousarray(scales).view(np.uint64)

    @classmethod
    def scale_shape(cls, groups: int) -> tuple[int, ...]:
        return groups, 2, PANEL

    @classmethod
    def stored_type(cls) -> Any:
        return np.uint32

    @classmethod
    def pack_scales(cls, scales: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(scales)[..., None].view(np.uint32)
        return np.ascontiguousarray(halves.swapaxes(-1, -2))

    @classmethod
    def unpack_scales(cls, scales: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(scales.swapaxes(-1, -2)).view(np.uint64)[..., 0]

    @classmethod
    def stored_factors(cls, scales: Any) -> tuple[Any, Any]:
        words = scales.swapaxes(-1, -2)
        if isinstance(words, np.ndarray):
            return np.ascontiguousarray(words).view(np.float32), None
        return jax.lax.bitcast_convert_type(words, jnp.float32), None

    @classmethod
    def factors_of(cls, scales: Any) -> tuple[Any, Any]:
        if scales.dtype == np.uint32:  # as they are stored
            return cls.stored_factors(scales)
        return np.ascontiguousarray(scales)[..., None].view(np.float32), None

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return looked_up(E2M1_VALUES, codes)


class Q6K(Supers):
    """Six bits, a scale of eight bits per sixteen inputs."""

    code, bits, offset, zero, parts = "q6_k", 6, 32, 32, 2

    @classmethod
    def products(cls, scale: Any, minimum: Any, first: Any, second: Any) -> tuple[Any, Any]:
        return cls.signed(scale, first, second), None

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = _planes(blocks[..., :128], 64, 4) | _planes(blocks[..., 128:192], 32, 2) << 4
        subs = blocks[..., 192:208]
        return _by_group(codes, _shared(blocks[..., 208:210]), subs[..., ::2], subs[..., 1::2])


class Q3K(Q6K):
    """Three bits, a scale of six bits per sixteen inputs."""

    code, bits, offset, zero = "q3_k", 3, 4, 4

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = _planes(blocks[..., 32:96], 32, 2) | _planes(blocks[..., :32], 32, 1) << 2
        low = blocks[..., None, 96:104] >> np.array([[0], [4]], np.uint8) & 15
        high = blocks[..., None, 104:108] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        subs = low.reshape(*blocks.shape[:-1], 16) | high.reshape(*blocks.shape[:-1], 16) << 4
        subs = subs - np.uint8(32)  # signed, in a byte
        return _by_group(codes, _shared(blocks[..., 108:110]), subs[..., ::2], subs[..., 1::2])


class Q2K(Supers):
    """Two bits, a scale and a minimum of four bits per sixteen inputs."""

    code, bits, parts = "q2_k", 2, 2

    @classmethod
    def products(cls, scale: Any, minimum: Any, first: Any, second: Any) -> tuple[Any, Any]:
        subs = namespace(first).stack([first, second], axis=-1)
        scales, minimums = (subs & 15).astype(np.float32), (subs >> 4).astype(np.float32)
        return scale[..., None] * scales, minimum[..., None] * minimums

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes, subs = _planes(blocks[..., 16:80], 32, 2), blocks[..., :16]
        return _by_group(codes, _shared(blocks[..., 80:84]), subs[..., ::2], subs[..., 1::2])


class Q50(Halves):
    """Five bits and a scale, as ggml's Q5_0."""

    code, bits, offset, zero = "q5_0", 5, 16, 16


class Q51(Pairs):
    """Five bits, a scale and a minimum, as ggml's Q5_1."""

    code, bits = "q5_1", 5


class Q41(Pairs):
    """Four bits, a scale and a minimum, as ggml's Q4_1."""

    code, bits = "q4_1", 4


class Int6(Halves):
    """Six bits and a scale: between int4 and int8, and no type of GGUF files."""

    code, bits, offset, zero = "int6", 6, 32, 32
    names = MappingProxyType({})
    most = float(31 * iq4.MOST_SCALE)

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        return _encoded(rows, native.encoder("int6") or int6.encoded)


class Iq4Nl(Halves):
    """Four bits that number sixteen values, and a scale."""

    code, bits, zero = "iq4_nl", 4, 8
    most = float(113 * iq4.MOST_SCALE)

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        return _encoded(rows, native.encoder("iq4") or iq4.encoded)

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return _iq4(codes)


class Iq4Xs(Supers):
    """Four bits that number sixteen values, and a scale of six bits per group."""

    code, bits, zero = "iq4_xs", 4, 8

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return _iq4(codes)

    @classmethod
    def products(cls, scale: Any, minimum: Any, first: Any, second: Any) -> tuple[Any, Any]:
        return cls.signed(scale, first), None

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = both_halves(blocks[..., 8:].reshape(*blocks.shape[:-1], SUPER, 16))
        high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")  # two bits of each group
        high = (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
        low = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15
        subs = (low.reshape(*blocks.shape[:-1], SUPER) | high << 4) - np.uint8(32)
        return _by_group(codes, _shared(blocks[..., :2]), subs, np.zeros_like(subs))


def _half(words: Any) -> Any:
    """The low 16 bits of words as float16, in float32."""
    low = (
        words.astype(np.uint16) if isinstance(words, jax.Array) else (words & 0xFFFF).astype("<u2")
    )
    if isinstance(low, np.ndarray):
        return low.view("<f2").astype(np.float32)
    return jax.lax.bitcast_convert_type(low, jnp.float16).astype(jnp.float32)


def _encoded(rows: np.ndarray, encode: Callable[[np.ndarray], Encoded]) -> Encoded:
    """Rows by an encoder of groups [n, 32], their scales as they are stored."""
    codes, scales, largest = encode(rows.reshape(-1, GROUP))
    by_row = scales.astype(np.float16).reshape(len(rows), -1)
    return codes.reshape(rows.shape), by_row, largest.reshape(by_row.shape)


def _iq4(codes: Any) -> Any:
    return looked_up(iq4.VALUES, codes)


def _planes(body: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Bytes [..., n] as codes [..., groups, 32]: of each run the lowest bits, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = body.reshape(*body.shape[:-1], -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return planes.reshape(*body.shape[:-1], -1, GROUP)


def _shared(halves: np.ndarray) -> np.ndarray:
    """One float16 or two as 32 bits, [..., blocks]."""
    words = np.ascontiguousarray(halves).view("<u2").astype(np.uint32)
    return words[..., 0] | (words[..., 1] << 16 if words.shape[-1] == 2 else np.uint32(0))


def _by_group(
    codes: np.ndarray, shared: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., groups, 32] and scales [..., groups] of blocks of eight groups.

    Args:
        codes: [..., blocks, 8, 32].
        shared: [..., blocks].
        first, second: the groups' bytes, [..., blocks, 8].
    """
    subs = first.astype(np.uint64) | second.astype(np.uint64) << np.uint64(8)
    scales = shared[..., None].astype(np.uint64) | subs << np.uint64(32)
    lead = codes.shape[:-3]
    return codes.reshape(*lead, -1, GROUP), scales.reshape(*lead, -1)
