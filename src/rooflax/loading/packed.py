"""Quantised weights in a checkpoint folder of our own: packed arrays, as they lie in memory.

config.json says {"quantization_config": {"quant_method": "rooflax", "formats": {weight: format}}},
a weight being a line of the family's table, or one of layers that differ ("layers.0.attn.qkv"). Its
arrays are tensors of model.safetensors under our names: layers.0.attn.qkv.values, .scales and, for
int8, .sums. All other weights are stored as in any checkpoint. Nothing is converted when such a
folder is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.safetensors import TensorToWrite, dtype_name
from rooflax.loading.source import Source
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import matmul_shape
from rooflax.nn.weights import LAYER_PREFIX, Slot
from rooflax.ops.formats import KNOWN
from rooflax.ops.host_arrays import Put, aligned_put
from rooflax.ops.weights import Quantized, class_of, placed
from rooflax.ops.weights.matrix_packing import as_panels

METHOD = "rooflax"
PARTS = ("values", "scales", "sums")


def table_name(slot: Slot) -> str:
    """The line of the family's table that a slot belongs to."""
    return slot.key if slot.layer is None else LAYER_PREFIX + slot.key


def is_packed(raw_config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its folder holds packed weights."""
    found = raw_config.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == METHOD


def to_config(formats: Iterable[tuple[Slot, str | None]]) -> dict[str, Any]:
    """What config.json says of packed weights; nothing where there are none.

    Args:
        formats: of every weight; None is a plain one's.
    """
    found = list(formats)
    by_line: dict[str, set[str | None]] = {}
    for slot, format in found:
        by_line.setdefault(table_name(slot), set()).add(format)
    names = {
        slot.name if len(by_line[table_name(slot)]) > 1 else table_name(slot): format
        for slot, format in found
        if format is not None
    }
    return {"quantization_config": {"quant_method": METHOD, "formats": names}} if names else {}


def tensors_of(slot: Slot, leaf: Quantized) -> list[TensorToWrite]:
    """A packed weight's arrays as tensors, in panels wherever they are."""
    leaf = as_panels(leaf)

    def tensor(part: str, array: jax.Array) -> TensorToWrite:
        name = f"{slot.name}.{part}"
        return TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda: np.asarray(array))

    arrays = [(part, getattr(leaf, part)) for part in PARTS]
    return [tensor(part, array) for part, array in arrays if array.size]


class PackedWeights:
    """The packed weights of a folder, checked against the model before the first is read.

    Attributes:
        formats: by slot, for `Storage.prequantized`.
        tensors: by slot, the names of its tensors.

    Raises:
        CheckpointError: a format or a weight that is not known, or tensors that do not fit.
    """

    def __init__(self, source: Source, name: str, config: Decoder, raw: Mapping[str, Any]):
        self._source, self._config = source, config
        declared = raw["quantization_config"].get("formats")
        if not isinstance(declared, dict):
            raise CheckpointError("config.json's quantization_config has no formats by weight.")
        found = list(config.slots())
        unknown = set(declared) - {n for slot in found for n in (slot.name, table_name(slot))}
        wrong = [f for f in declared.values() if not isinstance(f, str) or f not in KNOWN]
        if unknown or wrong:
            what = f"the weight {min(unknown)!r}" if unknown else f"the format {wrong[0]!r}"
            raise CheckpointError(f"config.json's quantization_config names {what}, which is not.")
        self.formats = {
            slot.name: format
            for slot in found
            if (format := declared.get(slot.name, declared.get(table_name(slot))))
        }
        packed = [slot for slot in found if slot.name in self.formats]
        present = set(source.names())
        self.tensors = {slot.name: self._check(slot, present) for slot in packed}

    def _check(self, slot: Slot, present: set[str]) -> tuple[str, ...]:
        in_shape, _ = matmul_shape(slot, self._config)
        if not class_of(self.formats[slot.name]).fits(math.prod(in_shape)):
            raise CheckpointError(f"{slot.name} cannot be {self.formats[slot.name]}.")
        names = []
        for part, wanted in zip(PARTS, self._arrays(slot), strict=True):
            if not math.prod(wanted.shape):
                continue
            name = f"{slot.name}.{part}"
            if name not in present:
                raise CheckpointError(f"The checkpoint lacks {name} {list(wanted.shape)}.")
            info, dtype = self._source.info(name), dtype_name(wanted.dtype)
            if (info.shape, info.dtype) != (wanted.shape, dtype):
                raise CheckpointError(
                    f"{name} is {info.dtype} {list(info.shape)}, wanted {dtype} "
                    f"{list(wanted.shape)}."
                )
            names.append(name)
        return tuple(names)

    def _arrays(self, slot: Slot) -> tuple[jax.ShapeDtypeStruct, ...]:
        in_shape, out_shape = matmul_shape(slot, self._config)
        stack = slot.line.shape(self._config.axis_sizes)[: slot.line.num_stacked]
        inner, outer = math.prod(in_shape), math.prod(out_shape)
        return class_of(self.formats[slot.name]).like(inner, outer, stack)

    def packed(self, slot: Slot, put: Put = aligned_put) -> Quantized:
        """A weight's arrays, as they are.

        Args:
            put: the file's own pages to where they stay.
        """
        stored = self._stored(slot)
        arrays = [getattr(stored, part) for part in PARTS]
        return placed(arrays, stored.format, stored.in_shape, stored.out_shape, put)

    def codes(self, slot: Slot, experts: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales [*experts, out, ...]."""
        stored = self._stored(slot)
        if slot.line.num_stacked:
            stored = replace(stored, values=stored.values[experts], scales=stored.scales[experts])
        return stored.unpacked()

    def _stored(self, slot: Slot) -> Quantized:
        """A weight's arrays in the file's pages."""
        stored = {name.rpartition(".")[2]: name for name in self.tensors[slot.name]}
        values, scales, sums = (
            self._source.read(stored[part])
            if part in stored
            else np.zeros(wanted.shape, wanted.dtype)
            for part, wanted in zip(PARTS, self._arrays(slot), strict=True)
        )
        shapes = matmul_shape(slot, self._config)
        format = self.formats[slot.name]
        return class_of(format)(values, scales, sums, format, *shapes)  # type: ignore[arg-type]
