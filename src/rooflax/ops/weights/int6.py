"""Six bits with a scale per group of 32, which is searched for; 6.5 bits a weight.

Tried are nine places of the group's largest number around the last code, as `iq4` tries them; the
scale of each is the weighted least squares' of the codes that it gives, where large numbers weigh
more.

NumPy's sums are in one order, so csrc/encode_blocks.cc gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflax.ops.weights.iq4 import Grid, inverse, searched_scales


def nearest(scaled: Any, xp: Any) -> Any:
    """The nearest whole number in -32 to 31, halves to even; of NaN the first."""
    q = xp.rint(scaled)
    return xp.where(q >= -32, xp.minimum(q, np.float32(31)), np.float32(-32))


GRID = Grid(last=-32, steps=128, nearest=nearest)


def encoded(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [n, 32], scales [n] in float32, and the largest magnitudes of groups [n, 32]."""
    scale = searched_scales(groups, np, grid=GRID)
    codes = nearest(groups * inverse(scale, np), np) + 32
    return codes.astype(np.uint8), scale[:, 0], np.abs(groups).max(axis=1)
