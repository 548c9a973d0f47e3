"""ggml's blocks as numbers: integer codes with scales where a type has them, float32 for all.

    Q8_0   w = q * d,                    q int8, d float16, 32 values a block
    Q4_0   w = (q - 8) * d,              q in 0..15, d float16; byte j holds values j and 16 + j
    Q5_0   w = (q - 16) * d,             as Q4_0, the fifth bits apart; q - 16 is an int8 here
    MXFP4  w = E2M1[q] * 2^(e - 127),    q in 0..15, e a byte; byte j holds values j and 16 + j

The classes of `ops.weights.formats` read these. Other types have scales within scales: the gguf
package turns them into float32, and where codes are wanted, these are rounded to int8 in the same
groups of 32.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from rooflax.loading.gguf import PLAIN, TYPES
from rooflax.ops.formats import GROUP
from rooflax.ops.weights import CODES, class_of
from rooflax.ops.weights.formats import Int8Groups

FORMATS = {kind: name for cls in CODES.values() for kind, name in cls.blocks.items()}
"""The weight format that holds a block type's numbers exactly (ops.formats)."""

ROUNDED = "w8a16-g32"
"""The weight format of every other block type."""

VALUES = {kind.name: kind.values for kind in TYPES.values()}
CHUNK_BLOCKS = 1 << 13
"""Blocks that are turned into numbers at a time, so that intermediates stay small."""


def codes_and_scales(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., values] as the type stores them, and scales [..., blocks].

    Args:
        kind: one of `FORMATS`.
        blocks: uint8 [..., blocks, bytes of a block].
    """
    codes, scales = class_of(FORMATS[kind]).from_blocks(kind, blocks)
    return codes.reshape(*codes.shape[:-2], -1), scales


def dequantize(kind: str, blocks: np.ndarray) -> np.ndarray:
    """[..., values] float32, block by block.

    Args:
        kind: any type that is not plain.
        blocks: uint8 [..., blocks, bytes of a block].
    """
    flat = blocks.reshape(-1, blocks.shape[-1])
    out = np.empty((len(flat), VALUES[kind]), np.float32)
    for begin in range(0, len(flat), CHUNK_BLOCKS):
        part = flat[begin : begin + CHUNK_BLOCKS]
        out[begin : begin + len(part)] = _floats(kind, part)
    return out.reshape(*blocks.shape[:-2], -1)


def _floats(kind: str, blocks: np.ndarray) -> np.ndarray:
    """[blocks, values] of [blocks, bytes]."""
    if kind not in FORMATS:
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):
            return quants.dequantize(blocks, GGMLQuantizationType[kind])
    with np.errstate(all="ignore"):
        kept = class_of(FORMATS[kind])
        return kept.scaled(*kept.from_blocks(kind, blocks))


def rounded_codes(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any block type as codes and scales of the format `ROUNDED`, some rows at a time.

    Args:
        blocks: uint8 [..., blocks, bytes of a block].
    """
    if FORMATS.get(kind) == "w8a8-g32":
        return codes_and_scales(kind, blocks)
    rows = blocks.reshape(-1, *blocks.shape[-2:])
    inner = rows.shape[1] * VALUES[kind]
    codes = np.empty((len(rows), inner), np.int8)
    scales = np.empty((len(rows), inner // GROUP), np.float16)
    step = max(1, CHUNK_BLOCKS // rows.shape[1])
    for begin in range(0, len(rows), step):
        where = slice(begin, begin + step)
        with np.errstate(all="ignore"):  # a damaged scale is for --check to find
            codes[where], scales[where] = Int8Groups.encode(dequantize(kind, rows[where]))
    return codes.reshape(*blocks.shape[:-2], -1), scales.reshape(*blocks.shape[:-2], -1)


def is_plain(kind: str) -> bool:
    """Whether a type's values are numbers as they lie."""
    return kind in PLAIN
