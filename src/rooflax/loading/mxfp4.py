"""MXFP4 as GPT-OSS checkpoints store it: blocks of 32 four-bit floats with one shared exponent.

value = E2M1[nibble] * 2^(scale - 127). A tensor X lies in the file as X_blocks, uint8
[experts, rows, groups, 16], low nibble first, and X_scales, uint8 [experts, rows, groups]; X itself
is [experts, groups * 32, rows].

Source: OCP Microscaling Formats v1.0; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

import numpy as np

from rooflax.errors import CheckpointError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
GROUP = 32


def names(name: str) -> tuple[str, str]:
    """The two tensors that hold `name`."""
    return f"{name}_blocks", f"{name}_scales"


def dequantized_shape(
    name: str, blocks: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the tensor that blocks and scales stand for."""
    if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != scales:
        raise CheckpointError(
            f"{name} is stored as MXFP4 blocks {list(blocks)} and scales {list(scales)}; wanted "
            f"[experts, rows, groups, 16] and [experts, rows, groups]."
        )
    experts, rows, groups, _ = blocks
    return experts, groups * GROUP, rows


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[experts, groups * 32, rows] float32, exact."""
    experts, rows, groups, half = blocks.shape
    out = np.empty((experts, groups * 2 * half, rows), np.float32)
    for expert in range(experts):
        values = np.empty((rows, groups, half, 2), np.float32)
        values[..., 0] = E2M1[blocks[expert] & 0x0F]
        values[..., 1] = E2M1[blocks[expert] >> 4]
        exponents = scales[expert].astype(np.int32)[..., None, None] - 127
        out[expert] = np.ldexp(values, exponents).reshape(rows, -1).T
    return out
