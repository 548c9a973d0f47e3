"""Schemes by which other libraries store quantized weights in folders of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooflax.loading.schemes.coded import CodedWeights, KeptCodes, Scheme
from rooflax.loading.schemes.gptq import read_awq, read_gptq
from rooflax.models.config_reader import ConfigReader

READERS: dict[str, Callable[[ConfigReader], Scheme]] = {"awq": read_awq, "gptq": read_gptq}

__all__ = ["CodedWeights", "KeptCodes", "Scheme", "read_scheme"]


def read_scheme(raw: Mapping[str, Any], ignore: Sequence[str] = ()) -> Scheme | None:
    """The scheme that config.json names; None where it names none of these.

    Raises:
        UnsupportedModelError: a key of it is not known, or has a value that is not read.
        CheckpointError: an impossible value.
    """
    declared = raw.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    if method not in READERS:
        return None
    named = declared | {"model_type": method}  # in sentences
    reader = ConfigReader(named, ignore=ignore, path="quantization_config.")
    scheme = READERS[method](reader)
    reader.finish()
    return scheme
