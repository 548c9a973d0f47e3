"""The formats of few bits, one class each: how numbers become codes, and codes numbers.

With w the weight [in, out], q its codes, s its scales and g = k // 32:

    int8       w[k, n] ~ q[k, n] * s[n],       q in -127..127, s[n] = max over k of |w| / 127
    int8-h64   H w ~ q[k, n] * s[n],           as int8, of a weight whose inputs are rotated
    int8-g32   w[k, n] ~ q[k, n] * s[g, n],    as ggml's Q8_0: s a float16
    int4       w[k, n] ~ (q[k, n] - 8) * s[g, n],  as ggml's Q4_0: q in 0..15, s a signed float16,
               the largest |w| of the group becomes -8
    mxfp4      w[k, n] ~ e2m1(q[k, n]) * 2^(s[g, n] - 127),  as in GPT-OSS; s a byte
    fp8        w[k, n] ~ e4m3(q[k, n]) * s[n],  s[n] = max over k of |w| / 448
    fp8-g32    w[k, n] = e4m3(q[k, n]) * s[g, n],   of checkpoints: s a float32
    nf4        w[k, n] = nf4(q[k, n]) * s[g, n],    likewise, as bitsandbytes has it

Formats that round take activations as int8 inside the matmul: one scale per row for int8, one per
row and group of 32 for the others.

To add one: a class here; XLA computes it then. Its names are its own where files alone have it, and
in ops.format_names where `quantize` makes it. A kernel is one more step for each platform:
`Code` in csrc/kernels.h with `kLayouts` in csrc/matmul_ffi.cc and LAYOUTS in ops/native.py; `CODES`
in linear/gpu_codes.py; `_weights` in linear/tpu.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.format_names import GROUP
from rooflax.ops.weights.packing import quantize
from rooflax.ops.weights.quantized import Encoded, Quantized, both_halves, split_blocks
from rooflax.ops.weights.rotation import BLOCK, restore, rotate

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1, -E2M1])
NF4_VALUES = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
"""Quantiles of a normal distribution, as bitsandbytes' functional.py has them."""
E8M0_VALUES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
FLOAT16_MAX = np.float32(65504)
FP8_MAX = 448.0
"""The largest number of e4m3."""


class Int8(Quantized):
    """int8 with a float32 scale per output."""

    code, grouped, has_sums = "int8", False, True
    value_type, scale_type = np.int8, np.float32

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        largest = np.abs(rows).max(axis=1)
        scales = largest / np.float32(127)
        return np.rint(rows * _inverse(scales)[:, None]).astype(np.int8), scales, largest


class RotatedInt8(Int8):
    """int8 with a float32 scale per output, of inputs rotated as `rotation` says.

    Kernels that know no rotation read it after `restored`.
    """

    code, has_matrix, rotates_inputs = "int8-h64", False, True

    @classmethod
    def fits(cls, inner: int) -> bool:
        return inner % BLOCK == 0

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        return Int8.encoded(restore(rows))

    def activations(self, x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
        return restore(super().activations(rotate(x)))

    def numbers(self) -> Float[Array, "*stack in out"]:
        return rotate(super().numbers().swapaxes(-1, -2)).swapaxes(-1, -2)

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n in"]:
        return rotate(super().take(ids))

    def restored(self) -> Quantized:
        codes, scales = self.unpacked()
        rows = rotate(codes * scales[..., None])
        shape = (*self.stack, *self.out_shape, *self.in_shape)
        shapes = self.in_shape, self.out_shape
        return quantize(rows.reshape(shape), "w8a8", *shapes, transposed=True, put=np.asarray)


class Fp8(Quantized):
    """e4m3 with a float32 scale per output."""

    code, grouped = "fp8", False
    scale_type = np.float32

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        largest = np.abs(rows).max(axis=1)
        scales = largest / np.float32(FP8_MAX)
        scaled = np.clip(rows * _inverse(scales)[:, None], -FP8_MAX, FP8_MAX)
        return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales, largest

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        if isinstance(codes, np.ndarray):
            return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


class Fp8Groups(Fp8):
    """e4m3 with a float32 scale per output and group of 32 inputs, of checkpoints alone."""

    code, grouped, has_matrix = "fp8-g32", True, False
    names = MappingProxyType({"fp8-a16-g32": False})


class Nf4(Quantized):
    """Four bits that number sixteen values with a float32 scale per output and group of 32 inputs,
    of checkpoints alone."""

    code, nibbles, zero, has_matrix = "nf4", True, 7, False
    scale_type = np.float32
    names = MappingProxyType({"nf4-a16": False})

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return looked_up(NF4_VALUES, codes)


class Int8Groups(Quantized):
    """int8 with a float16 scale per output and group of 32 inputs."""

    code = "int8-g32"
    value_type = np.int8
    most = float(127 * FLOAT16_MAX)
    blocks = MappingProxyType({"Q8_0": "w8a8-g32", "Q5_0": "w8a8-g32"})

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q5_0: laid out as Q4_0, with the fifth bits apart."""
        scales, body = split_blocks(blocks, "<f2")
        if kind == "Q8_0":
            return body.view(np.int8), scales
        fifth = np.unpackbits(body[..., :4], axis=-1, bitorder="little")
        return (both_halves(body[..., 4:]) | fifth << 4).view(np.int8) - np.int8(16), scales

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        groups = rows.reshape(len(rows), -1, GROUP)
        largest = np.abs(groups).max(axis=2)
        scales = np.minimum(largest / np.float32(127), FLOAT16_MAX)
        scaled = np.clip(groups * _inverse(scales)[:, :, None], -127, 127)
        whole = np.trunc(scaled)
        away = np.abs(scaled - whole) >= np.float32(0.5)  # halves go away from zero
        codes = (whole + np.copysign(away, scaled)).astype(np.int8)
        return codes.reshape(rows.shape), scales.astype(np.float16), largest


class Int4(Quantized):
    """Four bits with a float16 scale per output and group of 32 inputs."""

    code, nibbles, zero = "int4", True, 8
    most = float(8 * FLOAT16_MAX)
    blocks = MappingProxyType({"Q4_0": "w4a8"})

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales, body = split_blocks(blocks, "<f2")
        return both_halves(body), scales

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        groups = rows.reshape(len(rows), -1, GROUP)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)
        scales = np.clip(largest / np.float32(-8), -FLOAT16_MAX, FLOAT16_MAX)
        q = np.clip(groups * _inverse(scales) + np.float32(8.5), 0, 15).astype(np.uint8)
        return q.reshape(rows.shape), scales[:, :, 0].astype(np.float16), largest[:, :, 0]

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return codes.astype(jnp.float32) - 8.0


class Mxfp4(Quantized):
    """e2m1 with a power of two per output and group of 32 inputs."""

    code, nibbles = "mxfp4", True
    scale_type, broken_scale = np.uint8, 255
    blocks = MappingProxyType({"MXFP4": "mxfp4-a16"})

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales, body = split_blocks(blocks, "u1")
        return both_halves(body), scales

    @classmethod
    def are_finite(cls, scales: np.ndarray) -> np.ndarray:
        return scales != cls.broken_scale

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        """The exponent of the group's largest less e2m1's own; the nearest, of two the smaller."""
        groups = rows.reshape(len(rows), -1, GROUP)
        largest = np.abs(groups).max(axis=2)
        exponent = np.frexp(largest)[1] - 1 - 2 + 127
        scales = np.where(largest > 0, np.clip(exponent, 0, 254), 0).astype(np.uint8)
        scaled = groups / np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[:, :, None]
        middles = (E2M1[1:] + E2M1[:-1]) / 2
        size = np.searchsorted(middles, np.abs(scaled), side="left").astype(np.uint8)
        codes = size | np.where((scaled < 0) & (size > 0), 8, 0).astype(np.uint8)
        return codes.reshape(rows.shape), scales, largest

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        return looked_up(E2M1_VALUES, codes)

    @staticmethod
    def factors(scales: Any) -> Any:
        return looked_up(E8M0_VALUES, scales)


def looked_up(table: np.ndarray, index: Any) -> Any:
    """Entries of a table, on the host or not."""
    on_host = isinstance(index, np.ndarray)
    return (table if on_host else jnp.asarray(table))[index.astype(jnp.int32)]


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scale; 0 where it is too small for that, and all that it scales is next to nothing."""
    tiny = np.finfo(np.float32).tiny
    return np.divide(1, scales, where=np.abs(scales) >= tiny, out=np.zeros_like(scales))
