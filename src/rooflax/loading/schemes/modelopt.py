"""NVIDIA's Model Optimizer: fp8 and NVFP4, which a module's own tensors tell apart.

    fp8     X.weight e4m3 [out, in]; X.weight_scale
    NVFP4   X.weight uint8 [out, in / 2]; X.weight_scale e4m3 [out, in / 16]; X.weight_scale_2, a
            float32 that these are multiplied by

Source: modelopt, torch/export/quant_utils.py and torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooflax.loading.schemes.coded import CodedTensors, Tensors
from rooflax.loading.schemes.floats import fp8_weight, is_unused, nvfp4_weight
from rooflax.models.config_reader import ConfigReader

ALGORITHMS = (
    "FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION",
)  # fmt: skip


@dataclass(frozen=True)
class ModelOpt:
    """Its tensors."""

    def find(self, tensors: Tensors) -> CodedTensors:
        coded = {}
        for name in tensors.names:
            module, _, end = name.rpartition(".")
            if end != "weight" or tensors.info(name).dtype not in ("U8", "F8_E4M3"):
                continue
            scale, whole = f"{module}.weight_scale", f"{module}.weight_scale_2"
            if tensors.info(name).dtype == "U8":
                coded[name] = nvfp4_weight(tensors, name, scale, whole, divides=False)
                continue
            shape = tensors.expect(scale, None, "F32", "BF16", "F16", beside=name).shape
            outer, inner = tensors.info(name).shape
            is_block = len(shape) == 2 and shape not in ((1, 1), (outer, 1))
            block = (-(-outer // shape[0]), -(-inner // shape[1])) if is_block else None
            coded[name] = fp8_weight(tensors, name, scale, block)
        return CodedTensors(coded, {name for name in tensors.names if is_unused(name)})


def read_modelopt(reader: ConfigReader) -> ModelOpt:
    """The scheme of a quantization_config, or of hf_quant_config.json; errors as of
    `gptq.read_gptq`."""
    reader.choice("quant_algo", ALGORITHMS)
    reader.expect("group_size", 16, None)
    reader.waive(
        "ignore", "exclude_modules", "kv_cache_quant_algo", "kv_cache_scheme", "config_groups",
        "producer", "quantized_layers", "activation_scheme", "weights", "input_activations",
    )  # fmt: skip
    return ModelOpt()
