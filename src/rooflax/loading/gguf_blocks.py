"""ggml's blocks as numbers: integer codes with scales, float32 of all.

The classes of `ops.weights.formats` and `ops.weights.blocks` read them. On CPU a type stays what it
is in the file. Elsewhere kernels have few of them (Q8_0, Q4_0, MXFP4; Q5_0's codes less 16 are
int8); the others are turned into float32, and where codes are wanted, these are rounded to int8 in
groups of 32.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from rooflax.loading.gguf import PLAIN, TYPES
from rooflax.ops import accelerator
from rooflax.ops.format_names import GROUP
from rooflax.ops.weights import CODES, class_of
from rooflax.ops.weights.blocks import Block
from rooflax.ops.weights.formats import Int8Groups


def _readers(*, is_native: bool) -> dict[str, str]:
    """The formats that hold a type exactly; `is_native` ones are of `ops.weights.blocks`."""
    classes = (cls for cls in CODES.values() if issubclass(cls, Block) == is_native)
    return {kind: name for cls in classes for kind, name in cls.blocks.items()}


_EVERYWHERE = _readers(is_native=False)
_READERS = _EVERYWHERE | _readers(is_native=True)

VALUES = {kind.name: kind.values for kind in TYPES.values()}
CHUNK_BLOCKS = 1 << 13
"""Blocks that are turned into numbers at a time, so that intermediates stay small."""


def format_for(kinds: Set[str], *, moved: bool = False) -> str | None:
    """The weight format for tensors of these types; None where one of them is plain.

    Types that one format holds keep their numbers, and a single type is kept where kernels read it.

    Args:
        moved: groups of 32 do not stay in the blocks that they are in.
    """
    if any(is_plain(kind) for kind in kinds):
        return None
    rounded = accelerator.rounded_format()
    for table in (_EVERYWHERE,) if moved else (_READERS, _EVERYWHERE):
        kept = {kind: accelerator.readable(table.get(kind)) for kind in kinds}
        formats = {kept[kind] or _EVERYWHERE.get(kind, rounded) for kind in kinds}
        if len(formats) == 1:
            return formats.pop()
    return rounded


def codes_and_scales(kind: str, blocks: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., values] and scales [..., groups] of a format.

    Args:
        kind: a block type; what the format does not hold is rounded to int8 in groups.
        blocks: uint8 [..., blocks, bytes of a block].
    """
    reader = class_of(format)
    if kind not in reader.blocks:
        return rounded_codes(kind, blocks)
    codes, scales = reader.from_blocks(kind, blocks)
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
    with np.errstate(all="ignore"):
        if kind not in _READERS:
            from gguf import GGMLQuantizationType, quants

            return quants.dequantize(blocks, GGMLQuantizationType[kind])
        reader = class_of(_READERS[kind])
        return reader.scaled(*reader.from_blocks(kind, blocks[:, None])).reshape(len(blocks), -1)


def rounded_codes(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any block type as int8 in groups of 32, some rows at a time.

    Args:
        blocks: uint8 [..., blocks, bytes of a block].
    """
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
