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
from rooflax.nn.weights import LAYER_PREFIX, Param
from rooflax.ops import accelerator
from rooflax.ops.format_names import BESIDE, KNOWN, formats_of
from rooflax.ops.host_arrays import Put, aligned_put
from rooflax.ops.weights import Fused, Quantized, class_of, placed, quantized_parts
from rooflax.ops.weights.matrix_packing import as_panels
from rooflax.ops.weights.quantized import ARRAYS

METHOD = "rooflax"


def table_name(param: Param) -> str:
    """The line of the family's table that a parameter belongs to."""
    return param.key if param.layer is None else LAYER_PREFIX + param.key


def is_packed(raw_config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its folder holds packed weights."""
    declared = raw_config.get("quantization_config")
    return isinstance(declared, dict) and declared.get("quant_method") == METHOD


def to_config(formats: Iterable[tuple[Param, str | None]]) -> dict[str, Any]:
    """Entry in config.json for packed weights; empty if there are none.

    Args:
        formats: of every weight; None is a plain one's.
    """
    pairs = list(formats)
    by_line: dict[str, set[str | None]] = {}
    for param, format in pairs:
        by_line.setdefault(table_name(param), set()).add(format)
    names = {
        param.name if len(by_line[table_name(param)]) > 1 else table_name(param): format
        for param, format in pairs
        if format is not None
    }
    return {"quantization_config": {"quant_method": METHOD, "formats": names}} if names else {}


def tensors_of(param: Param, leaf: Quantized | Fused) -> list[TensorToWrite]:
    """A packed weight's arrays as tensors, in panels wherever they are."""

    def tensor(name: str, array: jax.Array) -> TensorToWrite:
        return TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda: np.asarray(array))

    parts = [as_panels(part) for part in quantized_parts(leaf)]
    arrays = [
        (f"{name}.{array}", getattr(part, array))
        for part, name in zip(parts, _names(param, len(parts)), strict=True)
        for array in ARRAYS
    ]
    return [tensor(name, array) for name, array in arrays if array.size]


def _names(param: Param, num_parts: int) -> list[str]:
    """Prefixes of the names of the parts' arrays."""
    return [param.name] if num_parts == 1 else [f"{param.name}.{i}" for i in range(num_parts)]


class PackedWeights:
    """The packed weights of a folder, checked against the model before the first is read.

    Attributes:
        formats: by parameter, for `Storage.prequantized`.
        tensors: by parameter, the names of its tensors.

    Raises:
        CheckpointError: a format or a weight that is not known, or tensors that do not fit.
    """

    def __init__(self, source: Source, name: str, config: Decoder, raw: Mapping[str, Any]):
        self._source, self._config = source, config
        declared = raw["quantization_config"].get("formats")
        if not isinstance(declared, dict):
            raise CheckpointError("config.json's quantization_config has no formats by weight.")
        params = list(config.params())
        unknown = set(declared) - {n for param in params for n in (param.name, table_name(param))}
        wrong = [
            params
            for params in declared.values()
            if not isinstance(params, str) or not set(formats_of(params)) <= KNOWN.keys()
        ]
        if unknown or wrong:
            what = f"the weight {min(unknown)!r}" if unknown else f"the format {wrong[0]!r}"
            raise CheckpointError(
                f"config.json's quantization_config has {what}, which is unknown."
            )
        self._stored_formats: dict[str, str] = {
            param.name: format
            for param in params
            if (format := declared.get(param.name, declared.get(table_name(param))))
        }
        self.formats = {
            name: BESIDE.join(map(accelerator.stored_format, formats_of(format)))
            for name, format in self._stored_formats.items()
        }
        packed = [param for param in params if param.name in self.formats]
        present = set(source.names())
        self.tensors = {param.name: self._check(param, present) for param in packed}

    def _check(self, param: Param, present: set[str]) -> tuple[str, ...]:
        inner = math.prod(matmul_shape(param, self._config)[0])
        format = self._stored_formats[param.name]
        try:
            part_arrays = [arrays for _, arrays in self._arrays(param)]
        except ValueError:
            part_arrays = []
        if not part_arrays or not all(class_of(one).fits(inner) for one in formats_of(format)):
            raise CheckpointError(f"{param.name} cannot be {format}.")
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

    def _arrays(self, param: Param) -> list[tuple[Part, dict[str, jax.ShapeDtypeStruct]]]:
        """Each part with its arrays by their names."""
        in_shape, out_shape = matmul_shape(param, self._config)
        stack = param.line.shape(self._config.axis_sizes)[: param.line.num_stacked]
        parts, by_part = self._stored_parts(param), []
        for part, name in zip(parts, _names(param, len(parts)), strict=True):
            sizes = math.prod(in_shape), math.prod(part.out_shape(out_shape))
            like = class_of(part.format).like(*sizes, stack)
            by_part.append((part, dict(zip([f"{name}.{a}" for a in ARRAYS], like, strict=True))))
        return by_part

    def packed(self, param: Param, put: Put = aligned_put) -> Quantized | Fused:
        """A weight's arrays, as they are.

        Args:
            put: the file's own pages to where they stay.
        """
        stored = (_placed(w, put) for w in self._stored(param))
        return beside(self.formats[param.name], self._stored_parts(param), stored)

    def codes(
        self, param: Param, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and scales [*experts, out, ...] of each part."""
        parts = self._stored(param)
        if param.line.num_stacked:
            parts = [replace(w, values=w.values[experts], scales=w.scales[experts]) for w in parts]
        return [_as_read(w).unpacked() for w in parts]

    def _stored_parts(self, param: Param) -> list[Part]:
        _, out_shape = matmul_shape(param, self._config)
        return parts_of(param.line.layout, self._stored_formats[param.name], out_shape)

    def _stored(self, param: Param) -> list[Quantized]:
        """A weight's parts in the file's pages."""
        present, stored = self.tensors[param.name], []
        in_shape, out_shape = matmul_shape(param, self._config)
        for part, wanted in self._arrays(param):
            arrays: list[Any] = [
                self._source.read(name) if name in present else np.zeros(like.shape, like.dtype)
                for name, like in wanted.items()
            ]
            values, scales, sums = arrays
            part_shape, make = part.out_shape(out_shape), class_of(part.format)
            stored.append(make(values, scales, sums, part.format, in_shape, part_shape))
        return stored


def _as_read(stored: Quantized) -> Quantized:
    """A stored weight as kernels here read it."""
    is_kept = accelerator.stored_format(stored.format) == stored.format
    return stored if is_kept else stored.restored()


def _placed(stored: Quantized, put: Put) -> Quantized:
    w = _as_read(stored)
    return placed([getattr(w, name) for name in ARRAYS], w.format, w.in_shape, w.out_shape, put)
