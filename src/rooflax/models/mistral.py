"""Mistral 7B, Nemo and Small: LLaMA with a window in every layer, or in none.

A config.json without `sliding_window` means a window of 4096; null means none.

Source: transformers, models/mistral/modeling_mistral.py; Jiang et al., Mistral 7B, 2023.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, ToldBy
from rooflax.nn.decoder import Decoder

GGUF = GGUFSpec(
    "llama", told_by=ToldBy("mistral3", "attention.temperature_scale", lambda value: not value),
    biases={}, stated={"sliding_window": None}, permuted=True, output_bias=True,
)  # fmt: skip
TINY = common.tiny(sliding_window=7)


def config_from_hf(reader: ConfigReader) -> Decoder:
    window = read_window(reader, 4096)
    attention = common.read_attention(reader, norm_eps=1e-6, kv_heads=8, window=window)
    return common.read_dense(reader, attention, max_position=131_072)


def read_window(reader: ConfigReader, absent: int | None) -> int | None:
    """The window of all layers; null is none, and `absent` stands for no key at all."""
    if reader.get("sliding_window", absent) is None or reader.is_null("sliding_window"):
        return None
    return reader.size("sliding_window", absent)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "mistral", "MistralForCausalLM")
    return written | {"sliding_window": common.windows_of(decoder)[0]}
