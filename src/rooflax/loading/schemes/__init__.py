"""Schemes by which other libraries store quantized weights in folders of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflax.loading.json_files import read_json_object
from rooflax.loading.schemes.bitsandbytes import read_bitsandbytes
from rooflax.loading.schemes.coded import CodedWeights, KeptCodes, Scheme
from rooflax.loading.schemes.compressed_tensors import read_compressed
from rooflax.loading.schemes.floats import (
    ACTIVATION_SCALES,
    CACHE_SCALES,
    read_fbgemm,
    read_fp8,
)
from rooflax.loading.schemes.gptq import read_auto_round, read_awq, read_gptq
from rooflax.loading.schemes.mlx import read_mlx
from rooflax.loading.schemes.modelopt import read_modelopt
from rooflax.loading.schemes.torchao import read_torchao
from rooflax.models.config_reader import ConfigReader

READERS: dict[str, Callable[[ConfigReader], Scheme]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "intel/auto-round": read_auto_round,
    "mlx": read_mlx,
    "modelopt": read_modelopt,
    "torchao": read_torchao,
}
KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json: the second is compressed-tensors' older one, the third MLX's."""
KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method")
"""Keys that quantize the KV cache."""
STATIC, DYNAMIC = ("FP8", "NVFP4", "MIXED_PRECISION"), ("FP8_PER_CHANNEL_PER_TOKEN",)
"""modelopt's algorithms that quantize activations, by stored scales and by their own."""
ROUNDS = "DynamicActivation"
"""In the names of torchao's configs that do."""
BOUND = "activation_scale_ub"
"""FBGEMM's largest scale of an activation."""
BESIDE = "hf_quant_config.json"
"""The file in which modelopt says what config.json may leave out."""

__all__ = ["CodedWeights", "KeptCodes", "Scheme", "declared_in", "not_applied", "read_scheme"]


def declared_in(raw: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Quantization that a checkpoint declares, with its `quant_method`."""
    for key in KEYS:
        declared = raw.get(key)
        if isinstance(declared, dict):
            named = "mlx" if "group_size" in declared else None
            return {"quant_method": named} | declared
    declared = read_json_object(folder / BESIDE).get("quantization")
    return {"quant_method": "modelopt"} | declared if isinstance(declared, dict) else None


def not_applied(declared: Mapping[str, Any], tensors: Collection[str] = ()) -> tuple[str, ...]:
    """Settings of a quantization scheme that rooflax does not apply: of activations and KV cache.

    Args:
        declared: as `declared_in` gives it.
        tensors: names of the checkpoint's; the scales among them are named.
    """
    method, groups = declared.get("quant_method"), declared.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    inputs = [group.get("input_activations") for group in groups if isinstance(group, dict)]
    rounded = [each for each in inputs if isinstance(each, dict)]
    algorithm = declared.get("quant_algo")
    is_static = declared.get("activation_scheme") == "static" or algorithm in STATIC
    ends, named = {name.rpartition(".")[2] for name in tensors}, []

    def add(setting: str, scales: Sequence[str]) -> None:
        named.append(f"{setting} ({', '.join(scales)})" if scales else setting)

    if is_static or any(each.get("dynamic") is not True for each in rounded):
        add("static activation scales", [name for name in ACTIVATION_SCALES if name in ends])
    elif (
        rounded
        or method in ("fp8", "fbgemm_fp8")
        or algorithm in DYNAMIC
        or ROUNDS in str(declared.get("quant_type"))
    ):
        add("activation quantization", [BOUND] * (BOUND in declared))
    if any(declared.get(key) for key in KV_KEYS):
        add("KV-cache quantization", [name for name in CACHE_SCALES if name in ends])
    return tuple(named)


def read_scheme(raw: Mapping[str, Any], folder: Path, ignore: Sequence[str] = ()) -> Scheme | None:
    """The scheme that a checkpoint names; None where it names none of these.

    Args:
        raw: config.json.
        ignore: keys to waive.

    Raises:
        UnsupportedModelError: a key of it is not known, or has a value that is not read.
        CheckpointError: an impossible value.
    """
    declared = declared_in(raw, folder)
    method = declared and declared["quant_method"]
    if declared is None or method not in READERS:
        return None
    named = declared | {"model_type": method}  # in sentences
    reader = ConfigReader(named, ignore=ignore, path="quantization_config.")
    reader.waive("quant_method")
    scheme = READERS[method](reader)
    reader.finish()
    return scheme
