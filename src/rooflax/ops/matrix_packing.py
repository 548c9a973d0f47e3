"""Quantised weights from panels of 16 outputs to matrices, as TPU kernels read them, and back.

Both hold the same codes and scales: see ops.quantization.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from rooflax.ops.formats import FORMATS
from rooflax.ops.quantization import PANEL, QuantizedArray, packed_arrays


def as_matrix(w: QuantizedArray) -> QuantizedArray:
    """The same weight, packed as matrices."""
    if w.is_matrix:
        return w
    inner, outer, lead = math.prod(w.in_shape), math.prod(w.out_shape), w.stack
    quads = w.values.reshape(*lead, -(-outer // PANEL), -1, PANEL, 4).swapaxes(-1, -2)
    values = jnp.moveaxis(quads, -4, -2).reshape(*lead, quads.shape[-3] * 4, -1)[..., :outer]
    if FORMATS[w.format].grouped:
        scales = w.scales.swapaxes(-3, -2).reshape(*lead, w.scales.shape[-2], -1)[..., :outer]
        scales = scales.astype(jnp.float32) if scales.dtype == jnp.float16 else scales
    else:
        values, scales = values[..., :inner, :], w.scales[..., None, :outer]
    sums = jnp.zeros(0, jnp.int32)
    return replace(w, values=values, scales=scales, sums=sums, packing="matrix")


def as_panels(w: QuantizedArray) -> QuantizedArray:
    """The inverse of `as_matrix`: what a file holds."""
    if not w.is_matrix:
        return w
    inner, outer, lead = math.prod(w.in_shape), math.prod(w.out_shape), w.stack
    code = FORMATS[w.format].code
    wanted = packed_arrays(w.format, inner, outer, lead)
    neutral = 0x88 if code == "int4" else 0  # codes of zero
    values = _padded(w.values, -w.values.shape[-2] % 4, -outer % PANEL, neutral)
    quads = values.reshape(*lead, -1, 4, values.shape[-1] // PANEL, PANEL)
    values = jnp.moveaxis(quads, -2, -4).swapaxes(-1, -2).reshape(wanted[0].shape)
    scales = _padded(w.scales, 0, -outer % PANEL, 0)
    if FORMATS[w.format].grouped:
        scales = scales.reshape(*lead, scales.shape[-2], -1, PANEL).swapaxes(-3, -2)
    scales = scales.astype(wanted[1].dtype).reshape(wanted[1].shape)
    sums = jnp.zeros(wanted[2].shape, jnp.int32)
    if code == "int8":
        sums = _padded(jnp.sum(w.values.astype(jnp.int32), -2, keepdims=True), 0, -outer % PANEL, 0)
        sums = sums.reshape(wanted[2].shape)
    return replace(w, values=values, scales=scales, sums=sums, packing="panels")


def _padded(x: jax.Array, rows: int, columns: int, value: int) -> jax.Array:
    widths = [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)]
    return jnp.pad(x, widths, constant_values=value)
