"""MXFP4 as GPT-OSS checkpoints store it: blocks of 32 four-bit floats with one shared exponent.

value = E2M1[nibble] * 2^(scale - 127). A tensor X lies in the file as X_blocks, uint8
[experts, rows, groups, 16], low nibble first, and X_scales, uint8 [experts, rows, groups]; X itself
is [experts, groups * 32, rows].

Source: OCP Microscaling Formats v1.0; transformers, integrations/mxfp4.py.
"""

from __future__ import annotations

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.source import Source
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import matmul_shape
from rooflax.nn.tensor_layouts import Swapped
from rooflax.nn.weights import Param
from rooflax.ops.format_names import GROUP
from rooflax.ops.host_arrays import Put
from rooflax.ops.weights import Quantized, pack
from rooflax.ops.weights.formats import Mxfp4

KEPT = "mxfp4-a16"
"""The format that keeps a checkpoint's numbers: activations are not rounded."""


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
        values = Mxfp4.scaled(_codes(blocks[expert]), scales[expert])
        out[expert] = values.reshape(rows, -1).T
    return out


def _codes(blocks: np.ndarray) -> np.ndarray:
    """[..., 16] bytes as 32 codes, low nibbles first."""
    return np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)


class Mxfp4Weights:
    """The weights of a checkpoint that can stay in MXFP4, for `Storage.prequantized`.

    The layers of a model are alike, because they may be stacked.
    """

    def __init__(self, source: Source, name: str, config: Decoder):
        self._source, self._config = source, config
        present = set(source.names())
        params = list(config.params())
        unpacked = {
            param.key
            for param in params
            if not (
                param.line.num_stacked and all(set(names(n)) <= present for n in param.hf_names)
            )
        }
        self.formats = {param.name: KEPT for param in params if param.key not in unpacked}

    def packed(self, param: Param, put: Put = jax.device_put) -> Quantized:
        """An array of experts from the file's own codes, gate's outputs before up's."""
        return pack(KEPT, *self.codes(param)[0], *matmul_shape(param, self._config), put)

    def codes(
        self, param: Param, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """[experts, out, in] and [experts, out, in / 32], gate's outputs before up's."""
        (name,) = param.hf_names
        blocks, scales = (self._source.read(part)[experts] for part in names(name))
        codes = _codes(blocks).reshape(*blocks.shape[:2], -1)
        if isinstance(param.line.layout, Swapped):
            return [(_gates_first(codes), _gates_first(scales))]
        return [(codes, scales)]


def _gates_first(rows: np.ndarray) -> np.ndarray:
    """[experts, 2 mlp, ...] with gate and up alternating, as all gates and then all ups."""
    experts, both, inner = rows.shape
    return rows.reshape(experts, both // 2, 2, inner).swapaxes(1, 2).reshape(rows.shape)
