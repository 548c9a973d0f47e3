"""`QuantizedArray`: weights in few bits, laid out for the CPU's byte products; and the formats.

A format states both widths, weights and activations. With w the weight [in, out] and s its scales:

    int8 (w8a8)   w[k, n] ~ q[k, n] * s[n],  q in -127..127,  s[n] = max over k of |w| / 127
    int4 (w4a8)   w[k, n] ~ (q[k, n] - 8) * s[g, n],  q in 0..15, g = k // 32, s a signed float16:
                  the largest |w| of the group becomes -8 (as in ggml's Q4_0)

Activations become int8 with one scale per row (int8) or per row and group of 32 (int4), inside
the product. Packing puts 16 outputs side by side, so that one load feeds one instruction for all
of them: int8 values are [out / 16, in / 4, 16, 4]; int4 values [out / 16, in / 32, 4, 16, 4], each
byte holding k = 4 s + j in its low half and 16 + 4 s + j in its high half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

PANEL, GROUP = 16, 32
CHUNK = 1 << 12
"""Outputs that are quantised at a time, so that intermediates stay small."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """A weight [*in, *out] in few bits.

    Attributes:
        values: packed, as the module says.
        scales: int8: float32 [out padded to 16]; int4: float16 [out / 16, in / 32, 16].
        sums: int8: the sum of q over k per output, int32; int4: empty.
        format: in ops.formats.
        in_shape, out_shape: of the weight it stands for.
    """

    values: Array
    scales: Array
    sums: Int[Array, " sums"]
    format: str = field(metadata={"static": True})
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.in_shape, *self.out_shape)

    @property
    def dtype(self) -> np.dtype:
        """What it stands for is float32."""
        return np.dtype(np.float32)

    @property
    def num_bytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in (self.values, self.scales, self.sums))


def fits(format: str, inner: int) -> bool:
    """Whether a weight with `inner` inputs can have the format: groups have 32 of them."""
    return format == "w8a8" or inner % GROUP == 0


def packed_bytes(format: str, inner: int, outer: int) -> int:
    """Bytes of a weight in a format."""
    padded = -(-outer // PANEL) * PANEL
    if format == "w8a8":
        return padded * (-(-inner // 4) * 4 + 4 + 4)
    return padded * inner // GROUP * (GROUP // 2 + 2)


def quantize(
    w: np.ndarray,
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    *,
    transposed: bool = False,
) -> QuantizedArray:
    """A weight on the host to a format, chunk by chunk of its outputs.

    Args:
        w: [*in, *out], or [*out, *in] if transposed, of any float dtype.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    matrix = w.reshape(outer, inner) if transposed else w.reshape(inner, outer).T
    panels = -(-outer // PANEL)
    pack = _pack_int8 if format == "w8a8" else _pack_int4
    parts = []
    for begin in range(0, panels * PANEL, CHUNK):
        rows = matrix[begin : begin + CHUNK].astype(np.float32)
        missing = -len(rows) % PANEL
        parts.append(pack(np.pad(rows, ((0, missing), (0, 0)))))
    values, scales, sums = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    put = jax.device_put
    return QuantizedArray(put(values), put(scales), put(sums), format, in_shape, out_shape)


def _pack_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [n, in] to (values, scales, sums)."""
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    inverse = np.divide(1, scales, where=scales > 0, out=np.zeros_like(scales))
    q = np.rint(rows * inverse[:, None]).astype(np.int8)
    sums = q.sum(axis=1, dtype=np.int32)
    q = np.pad(q, ((0, 0), (0, -q.shape[1] % 4)))
    values = q.reshape(-1, PANEL, q.shape[1] // 4, 4).swapaxes(1, 2)
    return np.ascontiguousarray(values), scales, sums


def _pack_int4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [n, in] to (values, scales, no sums)."""
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)
    scales = largest / np.float32(-8)
    inverse = np.divide(1, scales, where=scales != 0, out=np.zeros_like(scales))
    q = np.minimum(15, (groups * inverse + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
    both = q[:, :, :16] | (q[:, :, 16:] << 4)
    values = both.reshape(-1, PANEL, groups.shape[1], 4, 4).transpose(0, 2, 3, 1, 4)
    packed_scales = scales[:, :, 0].astype(np.float16).reshape(-1, PANEL, groups.shape[1])
    return (
        np.ascontiguousarray(values),
        np.ascontiguousarray(packed_scales.swapaxes(1, 2)),
        np.zeros(0, np.int32),
    )


def dequantize(w: QuantizedArray) -> Float[Array, "in out"]:
    """The matrix [in, out] that the values and scales stand for, float32."""
    inner, outer = math.prod(w.in_shape), math.prod(w.out_shape)
    if w.format == "w8a8":
        panels, quads = w.values.shape[:2]
        q = w.values.swapaxes(1, 2).reshape(panels * PANEL, quads * 4)
        return (q.astype(jnp.float32) * w.scales[:, None])[:outer, :inner].T
    q = _unpacked_int4(w.values).astype(jnp.float32)
    scales = w.scales.swapaxes(1, 2).reshape(q.shape[0], -1, 1).astype(jnp.float32)
    return (q * scales).reshape(q.shape[0], inner)[:outer].T


def _unpacked_int4(values: jax.Array) -> Int[Array, "out groups 32"]:
    """Values - 8 of outputs in order."""
    panels, groups = values.shape[:2]
    both = values.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL, groups, 16)
    q = jnp.concatenate([both & 15, both >> 4], axis=-1)
    return q.astype(jnp.int32) - 8


def rows_of(w: QuantizedArray, index: Int[Array, "*batch"]) -> Float[Array, "*batch in"]:
    """Weights of single outputs (an embedding's rows), float32."""
    inner = math.prod(w.in_shape)
    panel, lane = index // PANEL, index % PANEL
    if w.format == "w8a8":
        q = w.values.at[panel, :, lane].get(mode="promise_in_bounds")
        q = q.reshape(*index.shape, -1)[..., :inner].astype(jnp.float32)
        return q * w.scales.at[index].get(mode="promise_in_bounds")[..., None]
    both = w.values.at[panel, :, :, lane].get(mode="promise_in_bounds")
    both = both.reshape(*index.shape, -1, 16)
    q = jnp.concatenate([both & 15, both >> 4], axis=-1).astype(jnp.float32) - 8.0
    scales = w.scales.at[panel, :, lane].get(mode="promise_in_bounds").astype(jnp.float32)
    return (q * scales[..., None]).reshape(*index.shape, inner)


def quantized_product(x: Float[Array, "rows in"], w: QuantizedArray) -> Float[Array, "rows out"]:
    """x @ w as the formats define it: activations rounded to int8, products summed exactly.

    The readable reference of the native kernels.
    """
    if w.format == "w8a8":
        return _as_int8(x) @ dequantize(w)
    return _as_int8(x.reshape(x.shape[0], -1, GROUP)).reshape(x.shape) @ dequantize(w)


def _as_int8(x: jax.Array) -> jax.Array:
    """x rounded to 127 steps of the largest of its last axis."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    inverse = jnp.where(largest > 0, 127.0 / jnp.where(largest > 0, largest, 1.0), 0.0)
    return jnp.round(x * inverse) * (largest / 127.0)
