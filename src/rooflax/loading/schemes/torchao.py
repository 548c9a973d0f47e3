"""torchao's plain layouts, as transformers saves them: tensors that the files' metadata describes.

A weight M.weight is M._weight_qdata, M._weight_scale and perhaps M._weight_zero_point; the
metadata has a JSON for "M.weight" with its class and the block of numbers that share a scale.

    Int8Tensor                int8 [out, in]
    IntxUnpackedToInt8Tensor  int8 [out, in] of fewer bits, zero points of int8
    Float8Tensor              e4m3 [out, in]

Scales are [out / block, in / block]. Rejected: what torchao packs for one device (Int4Tensor,
Int4TilePackedTo4dTensor, Int4OpaqueTensor), and pickles, in which older versions saved weights.

Source: torchao, prototype/safetensors and quantization/quantize_/workflows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rooflax.errors import UnsupportedModelError
from rooflax.loading.schemes.coded import FLOATS, Coded, CodedTensors, Groups, Tensors, affine
from rooflax.loading.schemes.floats import fp8_weight
from rooflax.models.config_reader import ConfigReader

PLAIN, WHOLE_NUMBERS, FP8 = "Tensor", ("Int8Tensor", "IntxUnpackedToInt8Tensor"), "Float8Tensor"
CONFIGS = (
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig", "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig", "FqnToConfig", "ModuleFqnToConfig",
)  # fmt: skip
"""Configs whose weights can have one of these layouts."""
MAPPINGS = ("mapping_type", "weight_mapping_type")
SYMMETRIC = ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR")


@dataclass(frozen=True)
class TorchAo:
    """Its tensors.

    Attributes:
        symmetric: no weight of fewer than eight bits has zero points, as those of eight.
    """

    symmetric: bool

    def find(self, tensors: Tensors) -> CodedTensors:
        coded = {}
        for name, text in tensors.metadata.items():
            module, _, own = name.rpartition(".")
            if not module:
                continue
            described, stored = _description(tensors, name, text), f"{module}._{own}_"
            kind = described["_type"]
            if kind == PLAIN:
                continue
            if kind in WHOLE_NUMBERS:
                coded[name] = self._whole_numbers(tensors, name, stored, described["_data"])
            elif kind == FP8:
                block = _block(tensors, name, described["_data"])
                qdata, scale = f"{stored}qdata", f"{stored}scale"
                outer, inner = _shape(tensors, name, qdata)
                blocks = block if 1 < block[0] < outer and block[1] < inner else None
                coded[name] = fp8_weight(tensors, qdata, scale, blocks)
            else:
                raise UnsupportedModelError(
                    f"{name:.200} in {tensors.folder} is a {kind!r:.80} of torchao, which rooflax "
                    f"does not read (only {', '.join((*WHOLE_NUMBERS, FP8))})."
                )
        return CodedTensors(coded, set())

    def _whole_numbers(
        self, tensors: Tensors, name: str, stored: str, described: dict[str, Any]
    ) -> Coded:
        codes, scale, zero = (f"{stored}{end}" for end in ("qdata", "scale", "zero_point"))
        outer, inner = _shape(tensors, name, codes)
        tensors.expect(codes, (outer, inner), "I8", beside=codes)
        target = described.get("target_dtype", {"_data": "int8"})
        bits = BITS.get(str(target.get("_data")) if isinstance(target, dict) else "")
        rows, group = _block(tensors, name, described)
        if bits is None or rows not in (1, outer) or (rows > 1 and group != inner):
            raise tensors.error(codes, f"has blocks of {[rows, group]} and {target!r:.80}")
        groups = tensors.num_groups(codes, inner, group)
        shape = (outer if rows == 1 else 1, groups)
        kind = tensors.expect(scale, shape, *FLOATS, beside=codes).dtype
        has_zeros = zero in tensors
        if has_zeros:
            tensors.expect(zero, shape, "I8", beside=codes)
        half = np.uint8(1 << bits - 1)
        is_symmetric = self.symmetric or not has_zeros or bits == 8

        def offset(name: str) -> np.ndarray:
            """Codes from 0 on."""
            values = tensors.read(name)
            if bits < 8 and np.any((values < -int(half)) | (values >= half)):
                raise tensors.error(name, f"holds a number of more than {bits} bits")
            return values.view(np.uint8) + half

        def read() -> Groups:
            zeros = np.broadcast_to(offset(zero) if has_zeros else half, (outer, groups))
            scales = np.broadcast_to(tensors.read(scale), (outer, groups))
            return Groups(offset(codes), scales, zeros)

        return affine(
            (outer, inner), (codes, scale, zero)[: 2 + has_zeros], bits=bits, group=group,
            scales=kind, zero=int(half) if is_symmetric else None, read=read,
            error=partial(tensors.error, zero),
        )  # fmt: skip


BITS = {f"int{bits}": bits for bits in (2, 3, 4, 8)}


def _description(tensors: Tensors, name: str, text: str) -> dict[str, Any]:
    """The metadata's JSON of a tensor."""
    try:
        value = json.loads(text)
        if isinstance(value["_type"], str) and isinstance(value.get("_data", {}), dict):
            return value
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise tensors.error(name, "has metadata that describe no tensor of torchao")


def _shape(tensors: Tensors, name: str, codes: str) -> tuple[int, int]:
    if codes not in tensors:
        raise tensors.error(name, f"has no {codes.rpartition('.')[2]:.80} beside it")
    shape = tensors.info(codes).shape
    if len(shape) != 2 or 0 in shape:
        raise tensors.error(codes, f"has the shape {list(shape)}, wanted [out, in]")
    return shape[0], shape[1]


def _block(tensors: Tensors, name: str, described: dict[str, Any]) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    block = described.get("block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else [0]
    if all(type(size) is int and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise tensors.error(name, f"has block_size = {block!r:.80}; it must be two sizes")


def read_torchao(reader: ConfigReader) -> TorchAo:
    """The scheme of a quantization_config; errors as of `gptq.read_gptq`."""
    config = reader.part("quant_type").part("default")
    name = config.get("_type")
    if name not in CONFIGS:
        raise UnsupportedModelError(
            f"config.json has weights by torchao's {name!r:.80}, which packs them for one kind of "
            f"device (only {', '.join(CONFIGS)} are read)."
        )
    config.waive("_version")
    values = config.get("_data", {})
    mappings = [values.get(key) for key in MAPPINGS] if isinstance(values, dict) else []
    named = [each.get("_data") for each in mappings if isinstance(each, dict)]
    reader.waive(
        "modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights",
        "quant_type_kwargs", "quant_method",
    )  # fmt: skip
    return TorchAo(bool(named) and all(name in SYMMETRIC for name in named))
