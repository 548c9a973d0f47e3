"""NVIDIA's Model Optimizer: fp8 and NVFP4, which a module's own tensors tell apart.

    fp8     X.weight e4m3 [out, in]; X.weight_scale, of blocks [out / 128, 1, in / 128, 1], or
            X.weight_scale_inv [out / 128, in / 128]
    NVFP4   X.weight uint8 [out, in / 2]; X.weight_scale e4m3 [out, in / 16]; X.weight_scale_2, a
            float32 that these are multiplied by

Source: modelopt, torch/export/quant_utils.py, torch/quantization/config.py (128 x 128) and
torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooflax.loading.schemes.coded import CodedTensors, Tensors
from rooflax.loading.schemes.floats import NVFP4_GROUP, fp8_weight, is_unused, nvfp4_weight
from rooflax.models.config_reader import ConfigReader

OF_BLOCKS, BLOCK = "FP8_PB_WO", 128
ALGORITHMS = (
    "FP8", OF_BLOCKS, "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION",
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
            inverse = f"{scale}_inv"
            scale = inverse if inverse in tensors else scale
            coded[name] = fp8_weight(tensors, name, scale, (BLOCK, BLOCK))
        return CodedTensors(coded, {name for name in tensors.names if is_unused(name)})


def read_modelopt(reader: ConfigReader) -> ModelOpt:
    """The scheme of a quantization_config, or of hf_quant_config.json; errors as of
    `gptq.read_gptq`."""
    algorithm = reader.choice("quant_algo", ALGORITHMS)
    reader.expect("group_size", BLOCK if algorithm == OF_BLOCKS else NVFP4_GROUP, None)
    reader.waive(
        "ignore", "exclude_modules", "kv_cache_quant_algo", "kv_cache_scheme", "config_groups",
        "producer", "quantized_layers", "activation_scheme", "weights", "input_activations",
    )  # fmt: skip
    return ModelOpt()
