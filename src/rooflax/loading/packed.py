"""Quantised weights in a checkpoint folder of our own: packed arrays, as they lie in memory.

config.json says {"quantization_config": {"quant_method": "rooflax", "formats": {weight: format}}},
a weight being a line of the family's table, or one of layers that differ ("layers.0.attn.qkv"). Its
arrays are tensors of model.safetensors under our names: layers.0.attn.qkv.values, .scales and, for
int8, .sums; where the tensors of a fused weight have formats of their own ("q4_k|q4_k|q6_k"), those
of each run are layers.0.attn.qkv.0.values and so on. All other weights are stored as in any
checkpoint. Nothing is converted when such a folder is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.prequantized import beside
from rooflax.loading.safetensors import TensorToWrite, dtype_name
from rooflax.loading.source import Source
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import Part, matmul_shape, parts_of
from rooflax.nn.weights import LAYER_PREFIX, Slot
from rooflax.ops.formats import KNOWN, formats_of
from rooflax.ops.host_arrays import Put, aligned_put
from rooflax.ops.weights import Fused, Quantized, class_of, placed, quantized_parts
from rooflax.ops.weights.matrix_packing import as_panels
from rooflax.ops.weights.quantized import ARRAYS

METHOD = "rooflax"


def table_name(slot: Slot) -> str:
    """The line of the family's table that a slot belongs to."""
    return slot.key if slot.layer is None else LAYER_PREFIX + slot.key


def is_packed(raw_config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its folder holds packed weights."""
    declared = raw_config.get("quantization_config")
    return isinstance(declared, dict) and declared.get("quant_method") == METHOD


def to_config(formats: Iterable[tuple[Slot, str | None]]) -> dict[str, Any]:
    """Entry in config.json for packed weights; empty if there are none.

    Args:
        formats: of every weight; None is a plain one's.
    """
    pairs = list(formats)
    by_line: dict[str, set[str | None]] = {}
    for slot, format in pairs:
        by_line.setdefault(table_name(slot), set()).add(format)
    names = {
        slot.name if len(by_line[table_name(slot)]) > 1 else table_name(slot): format
        for slot, format in pairs
        if format is not None
    }
    return {"quantization_config": {"quant_method": METHOD, "formats": names}} if names else {}


def tensors_of(slot: Slot, leaf: Quantized | Fused) -> list[TensorToWrite]:
    """A packed weight's arrays as tensors, in panels wherever they are."""

    def tensor(name: str, array: jax.Array) -> TensorToWrite:
        return TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda: np.asarray(array))

    parts = [as_panels(part) for part in quantized_parts(leaf)]
    arrays = [
        (f"{name}.{array}", getattr(part, array))
        for part, name in zip(parts, _names(slot, len(parts)), strict=True)
        for array in ARRAYS
    ]
    return [tensor(name, array) for name, array in arrays if array.size]


def _names(slot: Slot, num_parts: int) -> list[str]:
    """Prefixes of the names of the parts' arrays."""
    return [slot.name] if num_parts == 1 else [f"{slot.name}.{i}" for i in range(num_parts)]


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
        slots = list(config.slots())
        unknown = set(declared) - {n for slot in slots for n in (slot.name, table_name(slot))}
        wrong = [
            slots
            for slots in declared.values()
            if not isinstance(slots, str) or not set(formats_of(slots)) <= KNOWN.keys()
        ]
        if unknown or wrong:
            what = f"the weight {min(unknown)!r}" if unknown else f"the format {wrong[0]!r}"
            raise CheckpointError(
                f"config.json's quantization_config has {what}, which is unknown."
            )
        self.formats = {
            slot.name: format
            for slot in slots
            if (format := declared.get(slot.name, declared.get(table_name(slot))))
        }
        packed = [slot for slot in slots if slot.name in self.formats]
        present = set(source.names())
        self.tensors = {slot.name: self._check(slot, present) for slot in packed}

    def _check(self, slot: Slot, present: set[str]) -> tuple[str, ...]:
        inner, format = math.prod(matmul_shape(slot, self._config)[0]), self.formats[slot.name]
        try:
            part_arrays = [arrays for _, arrays in self._arrays(slot)]
        except ValueError:
            part_arrays = []
        if not part_arrays or not all(class_of(one).fits(inner) for one in formats_of(format)):
            raise CheckpointError(f"{slot.name} cannot be {format}.")
        names = []
        for name, wanted in (pair for arrays in part_arrays for pair in arrays.items()):
            if not math.prod(wanted.shape):
                continue
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

    def _arrays(self, slot: Slot) -> list[tuple[Part, dict[str, jax.ShapeDtypeStruct]]]:
        """Each part with its arrays by their names."""
        in_shape, out_shape = matmul_shape(slot, self._config)
        stack = slot.line.shape(self._config.axis_sizes)[: slot.line.num_stacked]
        parts, by_part = parts_of(slot.line.layout, self.formats[slot.name], out_shape), []
        for part, name in zip(parts, _names(slot, len(parts)), strict=True):
            sizes = math.prod(in_shape), math.prod(part.out_shape(out_shape))
            like = class_of(part.format).like(*sizes, stack)
            by_part.append((part, dict(zip([f"{name}.{a}" for a in ARRAYS], like, strict=True))))
        return by_part

    def packed(self, slot: Slot, put: Put = aligned_put) -> Quantized | Fused:
        """A weight's arrays, as they are.

        Args:
            put: the file's own pages to where they stay.
        """
        parts, stored = [part for part, _ in self._arrays(slot)], self._stored(slot)
        return beside(self.formats[slot.name], parts, (_placed(w, put) for w in stored))

    def codes(
        self, slot: Slot, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and scales [*experts, out, ...] of each part."""
        parts = self._stored(slot)
        if slot.line.num_stacked:
            parts = [replace(w, values=w.values[experts], scales=w.scales[experts]) for w in parts]
        return [w.unpacked() for w in parts]

    def _stored(self, slot: Slot) -> list[Quantized]:
        """A weight's parts in the file's pages."""
        present, stored = self.tensors[slot.name], []
        in_shape, out_shape = matmul_shape(slot, self._config)
        for part, wanted in self._arrays(slot):
            arrays: list[Any] = [
                self._source.read(name) if name in present else np.zeros(like.shape, like.dtype)
                for name, like in wanted.items()
            ]
            values, scales, sums = arrays
            part_shape, make = part.out_shape(out_shape), class_of(part.format)
            stored.append(make(values, scales, sums, part.format, in_shape, part_shape))
        return stored


def _placed(stored: Quantized, put: Put) -> Quantized:
    arrays = [getattr(stored, name) for name in ARRAYS]
    return placed(arrays, stored.format, stored.in_shape, stored.out_shape, put)
