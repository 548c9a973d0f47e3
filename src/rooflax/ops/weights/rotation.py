"""Inputs in blocks of 64, each multiplied by a Hadamard matrix, so that outliers are spread.

One scale for a whole row leaves few of its 255 steps to most numbers where one of them is far
larger. H has entries of 1 and -1 and is its own inverse times 64, so x @ w = (x @ H) @ (H @ w / 64)
where both are multiplied block by block: neither side has outliers then, and 64 is exact.

Additions are made in one order everywhere, so the bits are those of the native kernels.

Source: Ashkboos et al., QuaRot, 2024 (there the rotations of a whole model are folded together).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rooflax.ops import native

BLOCK = 64
"""Inputs of a block; csrc/kernels.h has the same number."""


def rotate(x: Any) -> Any:
    """x [..., n] times H, block by block of its last axis, in float32; host arrays on the host."""
    if isinstance(x, np.ndarray) and (by_library := native.rotator()) is not None:
        return by_library(x)
    return butterflies(x, np if isinstance(x, np.ndarray) else jnp)


def butterflies(x: Any, xp: Any) -> Any:
    """`rotate` by sums and differences of neighbours, once for each bit of a place in a block."""
    y = x.reshape(-1, BLOCK)
    for _ in range(BLOCK.bit_length() - 1):
        even, odd = y[:, 0::2], y[:, 1::2]
        y = xp.concatenate([even + odd, even - odd], axis=1)
    return y.reshape(x.shape)


def restore(x: Any) -> Any:
    """The inverse of `rotate`."""
    return rotate(x) * np.float32(1 / BLOCK)
