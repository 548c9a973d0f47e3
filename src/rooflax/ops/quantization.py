"""`QuantizedArray`: weights in few bits, packed for the CPU's byte products.

With w the weight [in, out], q its codes, s its scales and g = k // 32 (formats are in ops.formats):

    int8       w[k, n] ~ q[k, n] * s[n],       q in -127..127, s[n] = max over k of |w| / 127
    int8-g32   w[k, n] ~ q[k, n] * s[g, n],    as ggml's Q8_0: s a float16
    int4       w[k, n] ~ (q[k, n] - 8) * s[g, n],  as ggml's Q4_0: q in 0..15, s a signed float16,
               the largest |w| of the group becomes -8
    mxfp4      w[k, n] ~ e2m1(q[k, n]) * 2^(s[g, n] - 127),  as in GPT-OSS; s a byte
    fp8        w[k, n] ~ e4m3(q[k, n]) * s[n],  s[n] = max over k of |w| / 448

Formats that round take activations as int8 inside the product: one scale per row for int8, one per
row and group of 32 for the others. Packing puts 16 outputs side by side, so that one load feeds one
instruction for all of them: bytes are [out / 16, in / 4, 16, 4] (with groups [out / 16, in / 32, 8,
16, 4]); nibbles [out / 16, in / 32, 4, 16, 4], each byte holding k = 4 s + j in its low half and
16 + 4 s + j in its high half. That is the packing "panels"; on TPU, whose tiles are 128 wide,
`matrix_packing` turns it into "matrix": bytes are [in, out], nibbles [in / 2, out] with k = 32 g +
i and 32 g + 16 + i in row 16 g + i; scales are [1, out] or [in / 32 padded to 32, out], in float32,
of mxfp4 as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Num

from rooflax.ops import accelerator
from rooflax.ops.formats import FORMATS, GROUP, PANEL
from rooflax.ops.host_arrays import aligned_zeros
from rooflax.ops.matrix_packing import as_matrix

CHUNK = 1 << 12
"""Outputs that are quantised at a time, so that intermediates stay small."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1, -E2M1])
E8M0_VALUES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
FLOAT16_MAX = np.float32(65504)
LARGEST = {"int8-g32": 127 * FLOAT16_MAX, "int4": 8 * FLOAT16_MAX}
"""The largest magnitude of formats whose scales are float16: others hold what float32 does."""
SCALE_TYPES = {"int8": np.float32, "fp8": np.float32, "mxfp4": np.uint8}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """A weight [*stack, *in, *out] in few bits; a stack is one axis of experts or layers, or none.

    Attributes:
        values: packed, as the module says.
        scales: [out padded to 16], or with groups [out / 16, in / 32, 16].
        sums: int8 in panels: the sum of q over k per output, int32; others: empty.
        format: in ops.formats.
        in_shape, out_shape: of the weight it stands for.
        packing: "panels" or "matrix".
    """

    values: Array
    scales: Array
    sums: Int[Array, "*sums"]
    format: str = field(metadata={"static": True})
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    packing: str = field(default="panels", metadata={"static": True})

    @property
    def is_matrix(self) -> bool:
        return self.packing == "matrix"

    @property
    def stack(self) -> tuple[int, ...]:
        if self.is_matrix:
            return self.values.shape[:-2]
        return self.values.shape[: self.values.ndim - (5 if FORMATS[self.format].grouped else 4)]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, *self.in_shape, *self.out_shape)

    @property
    def dtype(self) -> np.dtype:
        """What it stands for is float32."""
        return np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in (self.values, self.scales, self.sums))


FP8_MAX = 448.0
"""The largest number of e4m3."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPool:
    """Keys (or values) of a layer's blocks as int8 or e4m3, x ~ values * scales[..., None].

    Each token of each K/V head has its own scale: its largest element over the type's largest
    number, 127 or 448.
    """

    values: Num[Array, "_ kv_heads block_size head_dim"]
    scales: Float[Array, "_ kv_heads block_size"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def tokens_as_int8(x: Float[Array, "*batch head_dim"]) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a `QuantizedPool`: round(x / scale), scale = max |x| / 127."""
    values, scales = _scaled(x, 127.0)
    return jnp.round(values).astype(jnp.int8), scales


def tokens_as_fp8(x: Float[Array, "*batch head_dim"]) -> tuple[jax.Array, jax.Array]:
    """The same as e4m3, each x / scale the nearest number there is; scale = max |x| / 448.

    Its three bits of mantissa hold a number within 1/16 of itself down to 2**-15 of the largest.
    """
    values, scales = _scaled(x, FP8_MAX)
    return jnp.clip(values, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn), scales


def _scaled(x: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """x over a scale per vector, so that its largest element is `most`, and the scales."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / most
    inverse = jnp.where(scales > 0, 1.0 / jnp.where(scales > 0, scales, 1.0), 0.0)
    return x * inverse[..., None], scales


def fits(format: str, inner: int) -> bool:
    """Whether a weight with `inner` inputs can have the format: groups have 32 of them."""
    return not FORMATS[format].grouped or inner % GROUP == 0


def packed_bytes(format: str, inner: int, outer: int) -> int:
    """Bytes of a weight in a format, as `placed` packs it here."""
    arrays = packed_arrays(format, inner, outer)
    if accelerator.platform() == "tpu":
        weight = QuantizedArray(*arrays, format, (inner,), (outer,))  # type: ignore[arg-type]
        arrays = jax.tree.leaves(jax.eval_shape(as_matrix, weight))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def quantize(
    w: np.ndarray,
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    *,
    transposed: bool = False,
    put: Callable[[np.ndarray], Any] = jax.device_put,
) -> QuantizedArray:
    """A weight on the host to a format, chunk by chunk of its outputs.

    Args:
        w: [*stack, *in, *out], or [*stack, *out, *in] if transposed, of any float dtype.
        put: the packed arrays to where they stay.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    matrices = w.reshape(-1, outer, inner) if transposed else w.reshape(-1, inner, outer)
    code = FORMATS[format].code

    def encoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for matrix in matrices:
            rows = matrix if transposed else matrix.T
            for begin in range(0, outer, CHUNK):
                yield encode(code, rows[begin : begin + CHUNK].astype(np.float32))

    stack = w.shape[: w.ndim - (len(in_shape) + len(out_shape))]
    return _packed(encoded(), format, in_shape, out_shape, stack, put)


def pack(
    format: str,
    codes: np.ndarray,
    scales: np.ndarray,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Callable[[np.ndarray], Any] = jax.device_put,
) -> QuantizedArray:
    """Codes and scales that exist already, as a checkpoint has them.

    Args:
        codes: [*stack, out, in]: int8, or uint8 0..15 (int4: value + 8; mxfp4: e2m1's bits), or
            the bits of e4m3.
        scales: [*stack, out] or [*stack, out, in / 32]: float32, float16, or mxfp4's uint8.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    each = zip(codes.reshape(-1, outer, inner), _by_matrix(scales, format, outer), strict=True)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for code, scale in each:
            for begin in range(0, outer, CHUNK):
                yield code[begin : begin + CHUNK], scale[begin : begin + CHUNK]

    return _packed(chunks(), format, in_shape, out_shape, codes.shape[:-2], put)


def unpack(w: QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of host arrays, as `pack` takes them."""
    inner, outer, code = math.prod(w.in_shape), math.prod(w.out_shape), FORMATS[w.format].code
    values, scales, lead = np.asarray(w.values), np.asarray(w.scales), w.stack
    if code in ("int8", "fp8"):
        codes = values.swapaxes(-3, -2).reshape(*lead, values.shape[-4] * PANEL, -1)
        return codes[..., :outer, :inner], scales[..., :outer]
    groups = np.moveaxis(values, -2, -4)  # [panels, 16, groups, quads, 4]
    codes = groups.reshape(*lead, groups.shape[-5] * PANEL, groups.shape[-3], -1)
    if code != "int8-g32":
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    scales = scales.swapaxes(-1, -2).reshape(*codes.shape[:-1])
    return codes.reshape(*codes.shape[:-2], inner)[..., :outer, :], scales[..., :outer, :]


def _by_matrix(scales: np.ndarray, format: str, outer: int) -> np.ndarray:
    grouped = FORMATS[format].grouped
    return scales.reshape(-1, outer, scales.shape[-1]) if grouped else scales.reshape(-1, outer)


def packed_arrays(
    format: str, inner: int, outer: int, stack: tuple[int, ...] = ()
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and types of values, scales and sums."""
    code, panels = FORMATS[format].code, -(-outer // PANEL)
    if code in ("int8", "fp8"):
        values = (panels, -(-inner // 4), PANEL, 4)
        scales = (panels * PANEL,)
    else:
        quads = 8 if code == "int8-g32" else 4
        values = (panels, inner // GROUP, quads, PANEL, 4)
        scales = (panels, inner // GROUP, PANEL)
    sums = (*stack, panels * PANEL) if code == "int8" else (0,)
    return (
        jax.ShapeDtypeStruct((*stack, *values), np.int8 if "int8" in code else np.uint8),
        jax.ShapeDtypeStruct((*stack, *scales), SCALE_TYPES.get(code, np.float16)),
        jax.ShapeDtypeStruct(sums, np.int32),
    )


def _packed(
    chunks: Iterator[tuple[np.ndarray, np.ndarray]],
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    stack: tuple[int, ...],
    put: Callable[[np.ndarray], Any],
) -> QuantizedArray:
    """Chunks of (codes, scales) of outputs, matrix after matrix, in arrays made once."""
    inner, outer, count = math.prod(in_shape), math.prod(out_shape), math.prod(stack)
    code, wanted = FORMATS[format].code, packed_arrays(format, inner, outer, stack)
    arrays = [aligned_zeros(array.shape, array.dtype) for array in wanted]
    panels = count * -(-outer // PANEL)
    values, scales = (array.reshape(panels, -1) for array in arrays[:2])
    sums = arrays[2].reshape(-1, PANEL)
    at = 0
    for codes, scale in chunks:
        padding = -len(codes) % PANEL
        codes = np.pad(codes, ((0, padding), (0, 0)), constant_values=8 if code == "int4" else 0)
        end = at + len(codes) // PANEL
        values[at:end] = _pack_codes(code, codes).reshape(end - at, -1)
        scale = np.pad(scale, ((0, padding),) + ((0, 0),) * (scale.ndim - 1))
        by_panel = scale.reshape(end - at, PANEL, *scale.shape[1:]).swapaxes(1, -1)
        scales[at:end] = by_panel.reshape(end - at, -1)
        if code == "int8":
            sums[at:end] = codes.sum(axis=1, dtype=np.int32).reshape(-1, PANEL)
        at = end
    assert at == panels
    return placed(arrays, format, in_shape, out_shape, put)


def placed(
    arrays: Sequence[np.ndarray],
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Callable[[np.ndarray], Any] = jax.device_put,
) -> QuantizedArray:
    """A weight on the device, packed as the kernels there read it.

    Args:
        arrays: values, scales and sums on the host, in panels.
        put: them to where they stay.
    """
    w = QuantizedArray(*arrays, format, in_shape, out_shape)  # type: ignore[arg-type]
    return jax.tree.map(put, as_matrix(w) if accelerator.platform() == "tpu" else w)


def _pack_codes(code: str, codes: np.ndarray) -> np.ndarray:
    """Codes [n, in] of whole panels as [n / 16, ..., 16, 4]."""
    if code in ("int8", "fp8"):
        codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
        return codes.reshape(-1, PANEL, codes.shape[1] // 4, 4).swapaxes(1, 2)
    groups = codes.reshape(len(codes), -1, GROUP)
    if code != "int8-g32":
        groups = groups[:, :, :16] | (groups[:, :, 16:] << 4)
    quads = groups.shape[2] // 4
    return groups.reshape(-1, PANEL, groups.shape[1], quads, 4).transpose(0, 2, 3, 1, 4)


def encode(code: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [n, in] in float32 to (codes, scales): the readable definition of every format.

    Numbers that share a scale with NaN or infinity become NaN; one beyond `LARGEST` becomes that.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        codes, scales, largest = _ENCODERS[code](rows)
    if (broken := ~np.isfinite(largest)).any():
        codes.reshape(*broken.shape, -1)[broken] = 8 if code == "int4" else 0
        scales[broken] = 255 if code == "mxfp4" else np.nan
    return codes, scales


Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes, scales, and of what shares a scale the largest magnitude."""


def _encode_int8(rows: np.ndarray) -> Encoded:
    largest = np.abs(rows).max(axis=1)
    scales = largest / np.float32(127)
    return np.rint(rows * _inverse(scales)[:, None]).astype(np.int8), scales, largest


def _encode_fp8(rows: np.ndarray) -> Encoded:
    largest = np.abs(rows).max(axis=1)
    scales = largest / np.float32(FP8_MAX)
    scaled = np.clip(rows * _inverse(scales)[:, None], -FP8_MAX, FP8_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales, largest


def _encode_int8_groups(rows: np.ndarray) -> Encoded:
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    scales = np.minimum(largest / np.float32(127), FLOAT16_MAX)
    scaled = np.clip(groups * _inverse(scales)[:, :, None], -127, 127)
    whole = np.trunc(scaled)
    away = np.abs(scaled - whole) >= np.float32(0.5)  # halves go away from zero
    codes = (whole + np.copysign(away, scaled)).astype(np.int8)
    return codes.reshape(rows.shape), scales.astype(np.float16), largest


def _encode_int4(rows: np.ndarray) -> Encoded:
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)
    scales = np.clip(largest / np.float32(-8), -FLOAT16_MAX, FLOAT16_MAX)
    q = np.clip(groups * _inverse(scales) + np.float32(8.5), 0, 15).astype(np.uint8)
    return q.reshape(rows.shape), scales[:, :, 0].astype(np.float16), largest[:, :, 0]


def _encode_mxfp4(rows: np.ndarray) -> Encoded:
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


_ENCODERS = {
    "int8": _encode_int8,
    "fp8": _encode_fp8,
    "int8-g32": _encode_int8_groups,
    "int4": _encode_int4,
    "mxfp4": _encode_mxfp4,
}


def _inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scale; 0 where it is too small for that, and all that it scales is next to nothing."""
    tiny = np.finfo(np.float32).tiny
    return np.divide(1, scales, where=np.abs(scales) >= tiny, out=np.zeros_like(scales))


def dequantize(w: QuantizedArray) -> Float[Array, "*stack in out"]:
    """The matrix [in, out] that the values and scales stand for, float32."""
    inner, outer = math.prod(w.in_shape), math.prod(w.out_shape)
    code, lead = FORMATS[w.format].code, w.stack
    if w.is_matrix:
        return _matrix_numbers(code, w).reshape(*lead, inner, outer)
    if code in ("int8", "fp8"):
        q = w.values.swapaxes(-3, -2).reshape(*lead, w.values.shape[-4] * PANEL, -1)
        numbers = _numbers(code, q) * w.scales[..., None]
        return numbers[..., :outer, :inner].swapaxes(-1, -2)
    groups = jnp.moveaxis(w.values, -2, -4)  # [panels, 16, groups, quads, 4]
    q = groups.reshape(*lead, groups.shape[-5] * PANEL, groups.shape[-3], -1)
    scales = w.scales.swapaxes(-1, -2).reshape(*q.shape[:-1])
    numbers = _numbers(code, _nibbles(code, q)) * _scale(code, scales)[..., None]
    return numbers.reshape(*lead, -1, inner)[..., :outer, :].swapaxes(-1, -2)


def _matrix_numbers(code: str, w: QuantizedArray) -> jax.Array:
    """[*stack, groups, 32, out], or without groups [*stack, in, out]."""
    if code in ("int8", "fp8"):
        return _numbers(code, w.values) * w.scales
    scales = w.scales[..., : math.prod(w.in_shape) // GROUP, :]
    q = w.values.reshape(*scales.shape[:-1], -1, w.values.shape[-1])
    return _numbers(code, _nibbles(code, q, axis=-2)) * _scale(code, scales)[..., None, :]


def _nibbles(code: str, q: jax.Array, axis: int = -1) -> jax.Array:
    """Both halves of each byte, where codes have four bits."""
    return q if code == "int8-g32" else jnp.concatenate([q & 15, q >> 4], axis=axis)


def _numbers(code: str, q: jax.Array) -> jax.Array:
    """What codes stand for before they are scaled."""
    if code == "fp8":
        return jax.lax.bitcast_convert_type(q, jnp.float8_e4m3fn).astype(jnp.float32)
    if code == "mxfp4":
        return jnp.asarray(E2M1_VALUES)[q.astype(jnp.int32)]
    return q.astype(jnp.float32) - (8.0 if code == "int4" else 0.0)


def _scale(code: str, scales: jax.Array) -> jax.Array:
    if code == "mxfp4":
        return jnp.asarray(E8M0_VALUES)[scales.astype(jnp.int32)]
    return scales.astype(jnp.float32)


def member(w: jax.Array | QuantizedArray, index: jax.Array) -> jax.Array | QuantizedArray:
    """One of a stack."""
    if not isinstance(w, QuantizedArray):
        return w[index]
    sums = w.sums[index] if w.sums.ndim > 1 else w.sums
    return replace(w, values=w.values[index], scales=w.scales[index], sums=sums)


def rows_of(w: QuantizedArray, index: Int[Array, "*batch"]) -> Float[Array, "*batch in"]:
    """Weights of single outputs (an embedding's rows), float32."""
    inner, code = math.prod(w.in_shape), FORMATS[w.format].code
    if w.is_matrix:
        flat = index.reshape(-1)
        values, scales = (a.at[:, flat].get(mode="clip") for a in (w.values, w.scales))
        found = dequantize(replace(w, values=values, scales=scales, out_shape=flat.shape))
        return found.T.reshape(*index.shape, inner)
    panel, lane = index // PANEL, index % PANEL
    if code in ("int8", "fp8"):
        q = w.values.at[panel, :, lane].get(mode="promise_in_bounds")
        numbers = _numbers(code, q.reshape(*index.shape, -1)[..., :inner])
        return numbers * w.scales.at[index].get(mode="promise_in_bounds")[..., None]
    q = w.values.at[panel, :, :, lane].get(mode="promise_in_bounds")
    q = _nibbles(code, q.reshape(*index.shape, w.values.shape[1], -1))
    scales = w.scales.at[panel, :, lane].get(mode="promise_in_bounds")
    return (_numbers(code, q) * _scale(code, scales)[..., None]).reshape(*index.shape, inner)


def quantized_product(x: Float[Array, "rows in"], w: QuantizedArray) -> Float[Array, "rows out"]:
    """x @ w as the formats define it: products of rounded activations are summed exactly.

    The readable reference of the native kernels.
    """
    return rounded(x, w.format) @ dequantize(w)


def rounded(x: Float[Array, "rows in"], format: str) -> Float[Array, "rows in"]:
    """Activations as the format's product sees them."""
    if not FORMATS[format].rounds:
        return x
    if not FORMATS[format].grouped:
        return _as_int8(x)
    return _as_int8(x.reshape(x.shape[0], -1, GROUP)).reshape(x.shape)


def _as_int8(x: jax.Array) -> jax.Array:
    """x rounded to 127 steps of the largest of its last axis."""
    codes, scales = int8_codes(x)
    return codes * scales


def int8_codes(x: Float[Array, "*batch in"]) -> tuple[jax.Array, jax.Array]:
    """Whole numbers from -127 to 127, still as floats, and the size of a step per last axis."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    inverse = jnp.where(largest > 0, 127.0 / jnp.where(largest > 0, largest, 1.0), 0.0)
    return jnp.round(x * inverse), largest / 127.0
