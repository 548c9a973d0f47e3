"""ggml's IQ4_NL: sixteen values, not evenly spaced, and a scale per group that is searched for.

Weights of a matrix are nearly normal, and these values lie closer where most of them are: with a
searched scale the squared error is three quarters of that of evenly spaced codes. Tried are nine
places of the group's largest number around the end of the values; the scale of each is the weighted
least squares' of the codes that it gives, large numbers weighing more.

NumPy's sums are in one order, so csrc/encode_iq4.cc gives the same bits.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c, quantize_row_iq4_nl_impl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
TRIES = 4
"""Scales on each side of the one that gives the largest number the last value."""
STEPS = 64
"""Each is so small a part of that value."""
MOST_SCALE = np.float32(65504)


class Grid(NamedTuple):
    """Values of codes, as the search of a scale takes them.

    Attributes:
        last: the value that the largest number of a group gets.
        steps: each scale that is tried moves it by one of so many parts.
        nearest: (numbers divided by their scale, namespace) to the nearest values.
    """

    last: float
    steps: int
    nearest: Callable[[Any, Any], Any]


def searched_scales(groups: Any, xp: Any, importance: Any = 1, grid: Grid | None = None) -> Any:
    """Scales [..., 1] of groups [..., 32] in float32, on the host (xp is NumPy) or not.

    Args:
        importance: of inputs, what their squared errors are weighted by beside their own size.
        grid: the values of codes; None is IQ4_NL's.
    """
    grid = grid or Grid(float(VALUES[0]), STEPS, nearest)
    at = xp.argmax(xp.abs(groups), axis=-1)[..., None]
    most = xp.take_along_axis(groups, at, axis=-1)
    size = xp.sqrt(_sum(groups * groups, xp) / np.float32(groups.shape[-1]))
    weight = (xp.abs(groups) + size) * importance
    scale = best = xp.zeros_like(most)
    for attempt in range(-TRIES, TRIES + 1):
        last = np.float32(grid.last * (1 - attempt / grid.steps))
        values = grid.nearest(groups * (last / most), xp)
        weighted = weight * values
        total = _sum(weighted * groups, xp)
        new_scale = total / _sum(weighted * values, xp)
        gain = new_scale * total
        scale, best = xp.where(gain > best, new_scale, scale), xp.where(gain > best, gain, best)
    return xp.clip(scale, -MOST_SCALE, MOST_SCALE)


def encoded(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [n, 32], scales [n] in float32, and the largest magnitudes of groups [n, 32]."""
    scale = searched_scales(groups, np)
    codes = codes_of(groups * inverse(scale, np), np)
    return codes, scale[:, 0], np.abs(groups).max(axis=1)


def codes_of(scaled: Any, xp: Any) -> Any:
    """Numbers of the values that are nearest to numbers divided by their scale."""
    return sum((scaled >= middle).astype(xp.uint8) for middle in MIDDLES)


def nearest(scaled: Any, xp: Any) -> Any:
    """The values that are nearest."""
    values = xp.full_like(scaled, VALUES[0])
    for middle, step in zip(MIDDLES, np.diff(VALUES), strict=True):
        values = values + xp.where(scaled >= middle, step, np.float32(0))
    return values


def inverse(scale: Any, xp: Any) -> Any:
    """1 / scale; 0 where it is too small for that, and all that it scales is next to nothing."""
    is_usable = xp.abs(scale) >= np.finfo(np.float32).tiny
    return xp.where(is_usable, 1 / xp.where(is_usable, scale, np.float32(1)), np.float32(0))


def _sum(numbers: Any, xp: Any) -> Any:
    """Sum over the last axis, in order on the host."""
    if xp is not np:
        return xp.sum(numbers, axis=-1, keepdims=True)
    return sum(numbers[..., i, None] for i in range(numbers.shape[-1]))
