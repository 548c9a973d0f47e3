"""Checkpoints whose matmuls are e4m3 codes with a scale for each tensor, or each block of it.

value = code * scale, exact in float32. A tensor X has its scales in X_scale_inv or X_scale. Our fp8
has one scale for each output of a matmul, as a tensor's one scale can become; a block's cannot, so
that the codes of blocks are not kept.

Source: transformers, integrations/finegrained_fp8.py; vLLM, model_executor/layers/quantization/
fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.prequantized import output_order
from rooflax.loading.safetensors import TensorInfo
from rooflax.loading.source import Source
from rooflax.loading.tensor_plan import NameMap
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import is_head, is_matmul, matmul_shape
from rooflax.nn.weights import Slot, TensorLayout
from rooflax.ops.host_arrays import Put
from rooflax.ops.weights import Quantized, pack

KEPT = "fp8-a16"
NOT_A_NUMBER = 0x7F
"""Of an e4m3 code without its sign."""
SCALES = ("_scale_inv", "_scale")
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
        present = set(names)
        self._scales = {n: n + end for n in names for end in SCALES if n + end in present}
        other = {*self._scales.values(), *(n for n in names if n.endswith(ACTIVATIONS))}
        self._names = [n for n in names if n not in other]
        block = raw["quantization_config"].get("weight_block_size")
        block = BLOCK if block is None else block
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(n) is int and n > 0 for n in block)
        ):
            raise CheckpointError(
                f"config.json has weight_block_size = {block!r:.80}; it must be two whole numbers "
                f"above 0."
            )
        self._block = block

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        """Raises: CheckpointError: codes and scales do not fit each other, or one is not there."""
        info = self._source.info(name)
        if info.dtype.startswith("F8_") != (name in self._scales):
            has = "no scales, without which its codes are no numbers"
            has = has if name not in self._scales else "scales, which belong to F8 codes alone"
            raise CheckpointError(f"{name} is {info.dtype} and has {has}.")
        if name not in self._scales:
            return info
        scales = self._source.info(self._scales[name]).shape
        blocks = tuple(-(-n // b) for n, b in zip(info.shape, self._block, strict=False))
        if len(info.shape) != 2 or (scales not in ((), (1,)) and scales != blocks):
            raise CheckpointError(
                f"{name} {list(info.shape)} has scales {list(scales)}; wanted one, or one for each "
                f"block of {self._block}."
            )
        return TensorInfo("F32", info.shape, info.nbytes)

    def read(self, name: str) -> np.ndarray:
        codes = self._source.read(name)
        if name not in self._scales:
            return codes
        scales = self._read_scales(name)
        if scales.size > 1:
            for axis, size in enumerate(self._block):
                scales = np.repeat(scales, size, axis)
            scales = scales[: codes.shape[0], : codes.shape[1]]
        return codes.astype(np.float32) * scales

    def _read_scales(self, name: str) -> np.ndarray:
        return np.asarray(self._source.read(self._scales[name]), np.float32)

    def has_one_scale(self, name: str) -> bool:
        """Whether a tensor is e4m3 codes with one scale."""
        if name not in self._scales or self._source.info(name).dtype != "F8_E4M3":
            return False
        return len(self.info(name).shape) == 2 and self._read_scales(name).size == 1

    def codes(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A tensor's codes, and the scale of each row: NaN where a code is no number."""
        codes = self._source.read(name).view(np.uint8)
        scales = np.full(len(codes), self._read_scales(name).item(), np.float32)
        scales[((codes & NOT_A_NUMBER) == NOT_A_NUMBER).any(axis=1)] = np.nan
        return codes, scales

    def release(self, name: str) -> None:
        self._source.release(name)

    def prefetch(self, name: str) -> None:
        self._source.prefetch(name)


class KeptFp8:
    """The weights of a checkpoint that can stay fp8, for `Storage.prequantized`.

    The layers of a model are alike, because they may be stacked; experts become numbers.
    """

    def __init__(self, source: Fp8Weights, name: str, config: Decoder):
        self._source, self._config = source, config
        self._names = NameMap(set(source.names()), family(name))
        products = [slot for slot in config.slots() if is_matmul(slot, config)]
        other = {slot.key for slot in products if not self._keeps(slot)}
        self.formats = {slot.name: KEPT for slot in products if slot.key not in other}

    def _keeps(self, slot: Slot) -> bool:
        transposed = type(slot.line.layout) is TensorLayout and not is_head(slot, self._config)
        if slot.line.num_stacked or transposed:
            return False
        found = map(self._names.find, slot.hf_names)
        return all(name is not None and self._source.has_one_scale(name) for name in found)

    def packed(self, slot: Slot, put: Put = jax.device_put) -> Quantized:
        """A matmul's weight from the checkpoint's own codes."""
        return pack(KEPT, *self.codes(slot)[0], *matmul_shape(slot, self._config), put)

    def codes(
        self, slot: Slot, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """[out, in] and [out], in our order of outputs."""
        names = [self._names.find(name) or name for name in slot.hf_names]
        parts = [self._source.codes(name) for name in names]
        codes, scales = (np.concatenate(part) for part in zip(*parts, strict=True))
        ends = np.cumsum([len(part) for part, _ in parts])[:-1]
        numbers = np.split(np.arange(len(codes), dtype=np.int32)[:, None], ends)
        order = output_order(slot, self._config, numbers)
        return [(codes[order], scales[order])]
