"""A bias of scores by how far a key is from its query, in buckets, as T5 has it."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

NUM_BUCKETS = 32
FARTHEST = 128
"""Tokens from which on all distances are alike."""


def buckets(reach: int) -> np.ndarray:
    """Bucket of each distance from -reach to reach, key minus query: half of them are for keys
    behind the query, and in each half the nearer ones hold one distance.

    Source: transformers, models/mpnet/modeling_mpnet.py (relative_position_bucket).
    """
    distances = np.arange(-reach, reach + 1)
    far, half = np.abs(distances), NUM_BUCKETS // 2
    exact = half // 2
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(FARTHEST / exact)) * np.float32(half - exact)
    large = np.minimum(exact + ratio.astype(np.int64), half - 1)
    return np.where(far < exact, far, large) + (distances > 0) * half


def biases(table: Float[Array, "buckets N"], reach: int) -> Float[Array, "N distances"]:
    """Biases of each head's scores, by distances from -reach to reach."""
    return table[jnp.asarray(buckets(reach))].T.astype(jnp.float32)
