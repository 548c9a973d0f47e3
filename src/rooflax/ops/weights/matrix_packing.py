"""Quantised weights from panels of 16 outputs to matrices, as TPU kernels read them, and back.

Both hold the same codes and scales: see `quantized`. Arrays may be NumPy's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.ops.format_names import GROUP, PANEL
from rooflax.ops.tiles import ROWS
from rooflax.ops.weights.quantized import Quantized


def e8m0(scales: jax.Array) -> jax.Array:
    """2^(s - 127) by the bits of an exponent; of s = 0 the denormal; 255 is NaN."""
    bits = scales.astype(jnp.int32)
    bits = jnp.where(bits == 0, 1 << 22, jnp.where(bits == 255, 0x7FC00000, bits << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def as_matrix(w: Quantized) -> Quantized:
    """The same weight, packed as matrices; in panels if its format has no such packing."""
    if w.is_matrix or not w.has_matrix:
        return w
    xp: Any = np if isinstance(w.values, np.ndarray) else jnp
    inner, outer, lead = w.inner, w.outer, w.stack
    quads = w.values.reshape(*lead, -(-outer // PANEL), -1, PANEL, 4).swapaxes(-1, -2)
    values = xp.moveaxis(quads, -4, -2).reshape(*lead, quads.shape[-3] * 4, -1)[..., :outer]
    if w.grouped:
        scales = w.scales.swapaxes(-3, -2).reshape(*lead, w.scales.shape[-2], -1)[..., :outer]
        scales = scales.astype(np.float32) if scales.dtype == np.float16 else scales
        rows = [(0, 0)] * len(lead) + [(0, -scales.shape[-2] % ROWS), (0, 0)]
        scales = xp.pad(scales, rows)
    else:
        values, scales = values[..., :inner, :], w.scales[..., None, :outer]
    return replace(w, values=values, scales=scales, sums=xp.zeros(0, np.int32), packing="matrix")


def as_panels(w: Quantized) -> Quantized:
    """The inverse of `as_matrix`: what a file holds."""
    if not w.is_matrix:
        return w
    xp: Any = np if isinstance(w.values, np.ndarray) else jnp
    lead, panels = w.stack, -(-w.values.shape[-1] // PANEL)

    def padded(x: Any, multiple: int = 1, value: int = 0) -> Any:
        ends = [(0, -x.shape[-2] % multiple), (0, -x.shape[-1] % PANEL)]
        return xp.pad(x, [(0, 0)] * len(lead) + ends, constant_values=value)

    values = padded(w.values, 4, w.zero * 0x11 if w.nibbles else w.zero)
    quads = xp.moveaxis(values.reshape(*lead, -1, 4, panels, PANEL), -2, -4).swapaxes(-1, -2)
    scales = padded(w.scales)
    if w.grouped:
        scales = scales[..., : w.inner // GROUP, :]
        quads = quads.reshape(*lead, panels, scales.shape[-2], -1, PANEL, 4)
        scales = scales.reshape(*lead, -1, panels, PANEL).swapaxes(-3, -2)
        scales = scales.astype(np.float16) if scales.dtype == np.float32 else scales
    else:
        scales = scales[..., 0, :]
    sums = xp.zeros(0, np.int32)
    if w.has_sums:
        sums = padded(w.values.sum(axis=-2, keepdims=True, dtype=np.int32))[..., 0, :]
    return replace(w, values=quads, scales=scales, sums=sums, packing="panels")
