"""Numbers, codes or blocks to a `Quantized` weight, packed as the device's kernels read it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rooflax.ops import accelerator, native
from rooflax.ops.format_names import GROUP, PANEL
from rooflax.ops.host_arrays import aligned_zeros
from rooflax.ops.weights.matrix_packing import as_matrix
from rooflax.ops.weights.quantized import Quantized, class_of

CHUNK = 1 << 10
"""Outputs that are quantized at a time, so that intermediates stay small."""
Put = Callable[[np.ndarray], Any]
"""Moves a host array to where it stays."""


def packed_bytes(format: str, inner: int, outer: int) -> int:
    """Bytes of a weight in a format, as `placed` packs it here."""
    arrays = class_of(format).like(inner, outer)
    if accelerator.platform() == "tpu":
        weight = class_of(format)(*arrays, format, (inner,), (outer,))  # type: ignore[arg-type]
        arrays = jax.tree.leaves(jax.eval_shape(as_matrix, weight))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def quantize(
    w: np.ndarray,
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    *,
    transposed: bool = False,
    put: Put = jax.device_put,
) -> Quantized:
    """A weight on the host to a format, chunk by chunk of its outputs.

    Args:
        w: [*stack, *in, *out], or [*stack, *out, *in] if transposed, of any float dtype.
        put: the packed arrays to where they stay.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    matrices = w.reshape(-1, outer, inner) if transposed else w.reshape(-1, inner, outer)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for matrix in matrices:
            rows = matrix if transposed else matrix.T
            for begin in range(0, outer, CHUNK):
                part = rows[begin : begin + CHUNK].astype(np.float32)
                yield class_of(format).encode(part)

    stack = w.shape[: w.ndim - (len(in_shape) + len(out_shape))]
    return _packed(chunks(), format, in_shape, out_shape, stack, put)


def pack(
    format: str,
    codes: np.ndarray,
    scales: np.ndarray,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Put = jax.device_put,
) -> Quantized:
    """Codes and scales that exist already, as a checkpoint has them.

    Args:
        codes: [*stack, out, in]: int8, or uint8 0..15 (int4: value + 8; mxfp4: e2m1's bits), or
            the bits of e4m3.
        scales: [*stack, out] or [*stack, out, in / 32]: float32, float16, or mxfp4's uint8.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    groups = scales.shape[-1:] if class_of(format).grouped else ()
    each = zip(codes.reshape(-1, outer, inner), scales.reshape(-1, outer, *groups), strict=True)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for code, scale in each:
            for begin in range(0, outer, CHUNK):
                yield code[begin : begin + CHUNK], scale[begin : begin + CHUNK]

    return _packed(chunks(), format, in_shape, out_shape, codes.shape[:-2], put)


def _packed(
    chunks: Iterator[tuple[np.ndarray, np.ndarray]],
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    stack: tuple[int, ...],
    put: Put,
) -> Quantized:
    """Chunks of (codes, scales) of outputs, matrix after matrix, in arrays made once."""
    kind, outer, count = class_of(format), math.prod(out_shape), math.prod(stack)
    wanted = kind.like(math.prod(in_shape), outer, stack)
    arrays = [aligned_zeros(array.shape, array.dtype) for array in wanted]
    panels = count * -(-outer // PANEL)
    values, scales = (array.reshape(panels, -1) for array in arrays[:2])
    sums = arrays[2].reshape(-1, PANEL)

    def fill(at: int, codes: np.ndarray, scale: np.ndarray) -> None:
        padding = -len(codes) % PANEL
        if padding:
            codes = np.pad(codes, ((0, padding), (0, 0)), constant_values=kind.zero)
            scale = np.pad(scale, ((0, padding),) + ((0, 0),) * (scale.ndim - 1))
        end = at + len(codes) // PANEL
        values[at:end] = kind.pack_codes(codes).reshape(end - at, -1)
        panel_scales = scale.reshape(end - at, PANEL, *scale.shape[1:]).swapaxes(1, -1)
        scales[at:end] = kind.pack_scales(panel_scales).reshape(end - at, -1)
        if kind.has_sums:
            sums[at:end] = codes.sum(axis=1, dtype=np.int32).reshape(-1, PANEL)

    at, threads = 0, native.num_threads()
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(threads) as pool:  # NumPy copies outside Python's lock
        for codes, scale in chunks:
            waiting.append(pool.submit(fill, at, codes, scale))
            at += -(-len(codes) // PANEL)
            if len(waiting) > threads:
                waiting.popleft().result()
        for one in waiting:
            one.result()
    assert at == panels
    return placed(arrays, format, in_shape, out_shape, put)


def pack_blocks(
    format: str,
    kind: str,
    rows: np.ndarray,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Put = jax.device_put,
) -> Quantized | None:
    """Rows of a GGUF file's blocks by the native library, as `pack` makes it of their codes.

    Args:
        kind: the type of the blocks, one of the format's.
        rows: uint64 [*stack, out], the address of each output's blocks, which stay where they are.

    Returns:
        None where the library was not built, or does not know the type in this format.
    """
    cls, inner, outer = class_of(format), math.prod(in_shape), math.prod(out_shape)
    pack_rows = native.block_packer()
    if pack_rows is None or (cls.code, kind) == ("int8-g32", "Q5_0"):
        return None
    wanted = cls.like(inner, outer, rows.shape[:-1])
    arrays = [aligned_zeros(array.shape, array.dtype) for array in wanted]
    count = rows.size // outer
    values, scales = (array.reshape(-1).view(np.uint8).reshape(count, -1) for array in arrays[:2])
    for member_rows, value, scale in zip(rows.reshape(-1, outer), values, scales, strict=True):
        if not pack_rows(kind, member_rows, inner // GROUP, value, scale):
            return None
    return placed(arrays, format, in_shape, out_shape, put)


def placed(
    arrays: Sequence[np.ndarray],
    format: str,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Put = jax.device_put,
) -> Quantized:
    """A weight on the device, packed as the kernels there read it.

    Args:
        arrays: values, scales and sums on the host, in panels.
        put: them to where they stay.
    """
    w = class_of(format)(*arrays, format, in_shape, out_shape)  # type: ignore[arg-type]
    return jax.tree.map(put, as_matrix(w) if accelerator.platform() == "tpu" else w)
