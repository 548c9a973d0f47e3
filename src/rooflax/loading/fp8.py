"""Checkpoints whose matmuls are e4m3 codes with a scale for each tensor, or each block of it.

value = code * scale, read as float32, exact. A tensor X has its scales in X_scale_inv. Our fp8 has
one scale for each output of a matmul, which a block's cannot become, so the codes are not kept.

Source: transformers, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.safetensors import TensorInfo
from rooflax.loading.source import Source

SCALES = "_scale_inv"
ACTIVATIONS = ("activation_scale", "input_scale")
"""Scales of what a matmul reads, which is not rounded here."""
BLOCK = [128, 128]


def is_fp8(raw: Mapping[str, Any]) -> bool:
    declared = raw.get("quantization_config")
    return isinstance(declared, dict) and declared.get("quant_method") == "fp8"


class Fp8Weights:
    """The interface of a checkpoint over one with e4m3 codes."""

    def __init__(self, source: Source, raw: Mapping[str, Any]):
        self._source, names = source, source.names()
        self._scaled = {name for name in names if f"{name}{SCALES}" in set(names)}
        self._names = [n for n in names if not n.endswith((SCALES, *ACTIVATIONS))]
        block = raw["quantization_config"].get("weight_block_size") or BLOCK
        if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int for n in block):
            raise CheckpointError(f"config.json has weight_block_size = {block!r:.80}; wanted two.")
        self._block = block

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        """Raises: CheckpointError: codes and scales do not fit each other."""
        info = self._source.info(name)
        if name not in self._scaled:
            return info
        scales = self._source.info(f"{name}{SCALES}").shape
        blocks = tuple(-(-n // max(b, 1)) for n, b in zip(info.shape, self._block, strict=False))
        if len(info.shape) != 2 or (scales not in ((), (1,)) and scales != blocks):
            raise CheckpointError(
                f"{name} {list(info.shape)} has scales {list(scales)}; wanted one, or one for each "
                f"block of {self._block}."
            )
        return TensorInfo("F32", info.shape, info.nbytes)

    def read(self, name: str) -> np.ndarray:
        codes = self._source.read(name)
        if name not in self._scaled:
            return codes
        scales = np.asarray(self._source.read(f"{name}{SCALES}"), np.float32)
        if scales.size > 1:
            for axis, size in enumerate(self._block):
                scales = np.repeat(scales, size, axis)
            scales = scales[: codes.shape[0], : codes.shape[1]]
        return codes.astype(np.float32) * scales

    def release(self, name: str) -> None:
        self._source.release(name)

    def prefetch(self, name: str) -> None:
        self._source.prefetch(name)
