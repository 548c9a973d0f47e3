"""K-quants as llama.cpp's own quantizer makes them without an importance matrix, in NumPy.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c (make_qkx2_quants,
make_qx_quants, quantize_row_q4_K_ref and its like) and src/llama-quant.cpp (the recipe).
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

SUPER = 256
"""Weights of a block."""
CHUNK = 1 << 16
"""Weights that a thread quantizes at a time, so that they stay in its cache."""
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types that stand in where inputs do not divide into blocks of 256."""
RECIPES = {"Q4_K_M": "Q4_K", "Q6_K": "Q6_K"}
"""The type of most matrices."""
_LEVELS = {"Q4_K": (15, -1.0, 20), "Q5_K": (31, -0.5, 15)}
"""The largest code, where the search of a scale begins, and its steps."""
_TINY = np.float32(1e-15)


def recipe_type(recipe: str, name: str, num_layers: int, *, is_head: bool, experts: int) -> str:
    """The type of a tensor in a file, as `llama-quantize` chooses it.

    Args:
        name: as it is stored.
        is_head: it makes the logits.
        experts: of a layer; 0 where it has none.
    """
    kind = RECIPES.get(recipe, recipe)
    if recipe != "Q4_K_M":
        return kind
    if is_head:
        return "Q6_K"
    layer = re.match(r"blk\.(\d+)\.", name)
    part = name.split(".")[-2]
    first = num_layers // 8
    number = int(layer[1]) if layer else 0
    more = number < first or number >= 7 * num_layers // 8 or (number - first) % 3 == 2
    if experts == 8 and part in ("attn_k", "attn_v"):
        return "Q8_0"
    if experts == 8 and part == "attn_output":
        return "Q5_K"
    if part == "attn_qkv":
        return "Q5_K"
    return "Q6_K" if more and (part == "attn_v" or part.startswith("ffn_down")) else kind


def quantize_blocks(array: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of a K-quant, uint8 [..., bytes of a row].

    A block with NaN or infinity becomes NaN.

    Args:
        array: float32 [..., inputs], a multiple of 256.
        kind: "Q4_K", "Q5_K" or "Q6_K".
    """
    flat = array.reshape(-1, SUPER)
    each = CHUNK // SUPER
    chunks = [flat[begin : begin + each] for begin in range(0, len(flat), each)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = _signed_blocks if kind == "Q6_K" else partial(_affine_blocks, kind=kind)
        blocks = list(pool.map(made, chunks))
    return np.concatenate(blocks).reshape(*array.shape[:-1], -1)


def _affine_blocks(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Q4_K and Q5_K."""
    levels, first, steps = _LEVELS[kind]
    with np.errstate(all="ignore"):
        x = np.ascontiguousarray(blocks.reshape(-1, 32).T)
        scales, minimums = (a.reshape(-1, 8) for a in _searched_affine(x, levels, first, steps))
        shared, sixes = zip(*(_six_bits(a) for a in (scales, minimums)), strict=True)
        broken = ~np.isfinite(blocks).all(axis=1)
        halves = np.stack([np.where(broken, np.float16(np.nan), half) for half in shared], axis=1)
        d, m = (
            half.astype(np.float32)[:, None] * six.astype(np.float32)
            for half, six in zip(halves.T, sixes, strict=True)
        )
        q = (blocks.reshape(-1, 8, 32) + m[..., None]) / np.where(d == 0, np.inf, d)[..., None]
        codes = np.nan_to_num(np.clip(np.rint(q), 0, levels)).astype(np.uint8)
    parts = [halves.view(np.uint8), _six_bit_bytes(*sixes)]
    if levels > 15:
        fifth = codes >> 4 << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(fifth, axis=1))
    low = codes & 15
    parts.append((low[:, ::2] | low[:, 1::2] << 4).reshape(len(codes), -1))
    return np.concatenate(parts, axis=1)


def _searched_affine(
    x: np.ndarray, levels: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minimums of [32, groups] with the least weighted error: w = scale q - minimum."""
    w = np.sqrt(np.square(x).sum(0) / np.float32(len(x))) + np.abs(x)
    wx = w * x
    least, most = np.minimum(x.min(0), 0), x.max(0)
    differ = most > least
    sum_w, sum_x = w.sum(0), wx.sum(0)
    q, buffer = np.empty_like(x), np.empty_like(x)

    def codes(levels_above: np.floating) -> None:
        np.multiply(np.subtract(x, least, out=q), levels_above / (most - least), out=q)
        np.clip(np.rint(q, out=q), 0, levels, out=q)

    def error(scale: np.ndarray, low: np.ndarray) -> np.ndarray:
        np.subtract(np.add(np.multiply(q, scale, out=buffer), low, out=buffer), x, out=buffer)
        return np.multiply(np.square(buffer, out=buffer), w, out=buffer).sum(0)

    scale = 1 / (np.float32(levels) / (most - least))
    codes(np.float32(levels))
    best = error(scale, least)
    for step in range(steps + 1):  # each from the least number of the best before
        codes(np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(levels))
        wq = np.multiply(w, q, out=buffer)
        sum_q = wq.sum(0)
        sum_qq = np.multiply(wq, q, out=wq).sum(0)
        sum_qx = np.multiply(wx, q, out=buffer).sum(0)
        determinant = sum_w * sum_qq - sum_q * sum_q
        new_scale = (sum_w * sum_qx - sum_x * sum_q) / determinant
        new_low = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        above_zero = new_low > 0
        new_scale = np.where(above_zero, sum_qx / sum_qq, new_scale)
        new_low = np.where(above_zero, np.float32(0), new_low)
        new_error = error(new_scale, new_low)
        better = (determinant > 0) & (new_error < best)
        best = np.where(better, new_error, best)
        scale, least = np.where(better, new_scale, scale), np.where(better, new_low, least)
    return np.where(differ, scale, 0), -least


def _six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [blocks, 8] from 0 on as a float16 of each block and six bits of each."""
    most = np.maximum(numbers.max(axis=1), 0)
    inverse = np.where(most > 0, np.float32(63) / most, 0).astype(np.float32)
    six = np.clip(np.rint(inverse[:, None] * numbers), 0, 63)
    return (most / np.float32(63)).astype(np.float16), np.nan_to_num(six).astype(np.uint8)


def _six_bit_bytes(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Twelve bytes of [blocks, 8] each."""
    first = [six[:, :4] | six[:, 4:] >> 4 << 6 for six in (scales, minimums)]
    rest = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return np.concatenate([*first, rest], axis=1)


def _signed_blocks(blocks: np.ndarray) -> np.ndarray:
    """Q6_K."""
    with np.errstate(all="ignore"):
        x = np.ascontiguousarray(blocks.reshape(-1, 16).T)
        scales = _searched_signed(x).reshape(-1, 16)
        largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], axis=1)
        inverse = np.where(np.abs(largest) < _TINY, 0, np.float32(-128) / largest)
        d = np.where(inverse == 0, 0, 1 / inverse).astype(np.float16)
        d[~np.isfinite(blocks).all(axis=1)] = np.nan
        levels = np.nan_to_num(np.minimum(np.rint(inverse * scales), 127)).astype(np.int8)
        step = d.astype(np.float32) * levels
        q = blocks.reshape(-1, 16, 16) / np.where(step == 0, np.inf, step)[..., None]
        q = np.nan_to_num(np.clip(np.rint(q), -32, 31)).astype(np.int8)
    codes = (q + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    parts = [
        low[:, :, :2] | low[:, :, 2:] << 4,
        np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2),
        levels.view(np.uint8),
        d.view(np.uint8),
    ]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


def _searched_signed(x: np.ndarray) -> np.ndarray:
    """Scales of [16, groups] with the least squared error, weighted by the squares."""
    largest = np.take_along_axis(x, np.abs(x).argmax(0)[None], axis=0)[0]
    w = np.square(x)
    wx = w * x
    scale = best = np.float32(0)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(32) + np.float32(0.1) * step) / largest
        q = np.clip(np.rint(inverse.astype(np.float32) * x), -32, 31)
        sum_qx, sum_qq = (wx * q).sum(0), (w * q * q).sum(0)
        new = np.where(sum_qq > 0, sum_qx / sum_qq, 0)
        better = (sum_qq > 0) & (sum_qx * sum_qx > best * sum_qq) | (step == 0)
        best, scale = np.where(better, new * sum_qx, best), np.where(better, new, scale)
    return np.where(np.abs(largest) < _TINY, 0, scale).astype(np.float32)
