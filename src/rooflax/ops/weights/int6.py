"""Six bits with a scale per group of 32, which is searched for; 6.5 bits a weight.

Tried are nine places of the group's largest number around the last code, as `iq4` tries them; the
scale of each is the weighted least squares' of the codes that it gives, where large numbers weigh
more.

NumPy's sums are in one order, so csrc/encode_blocks.cc gives the same bits.
"""

from __future__ import annotations

import numpy as np

from rooflax.ops.weights.iq4 import MOST_SCALE, TRIES, inverse

STEPS = 128
"""Each place is so small a part of the last code."""


def encoded(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [n, 32], scales [n] in float32, and the largest magnitudes of groups [n, 32]."""
    scale = searched_scales(groups)
    codes = nearest(groups * inverse(scale, np)) + 32
    return codes.astype(np.uint8), scale[:, 0], np.abs(groups).max(axis=1)


def searched_scales(groups: np.ndarray) -> np.ndarray:
    """Scales [n, 1] of groups [n, 32] in float32."""
    at = np.abs(groups).argmax(axis=1)[:, None]
    most = np.take_along_axis(groups, at, axis=1)
    size = np.sqrt(_sum(groups * groups) / np.float32(groups.shape[1]))
    weight = np.abs(groups) + size
    scale = best = np.zeros_like(most)
    for attempt in range(-TRIES, TRIES + 1):
        values = nearest(groups * (np.float32(-32 * (1 - attempt / STEPS)) / most))
        weighted = weight * values
        total = _sum(weighted * groups)
        new_scale = total / _sum(weighted * values)
        gain = new_scale * total
        scale, best = np.where(gain > best, new_scale, scale), np.where(gain > best, gain, best)
    return np.clip(scale, -MOST_SCALE, MOST_SCALE)


def nearest(scaled: np.ndarray) -> np.ndarray:
    """The nearest whole number in -32 to 31, halves to even; of NaN the first."""
    q = np.rint(scaled)
    return np.where(q >= -32, np.minimum(q, np.float32(31)), np.float32(-32))


def _sum(numbers: np.ndarray) -> np.ndarray:
    """Sum over the last axis, in order."""
    return sum(numbers[:, i, None] for i in range(numbers.shape[1]))  # type: ignore[return-value]
