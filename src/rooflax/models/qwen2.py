"""Qwen 1.5, 2 and 2.5: LLaMA with biases on q, k and v, and optional windows in the upper layers.

Source: transformers, models/qwen2/modeling_qwen2.py; Qwen Team, Qwen2.5 Technical Report, 2024.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.mistral import read_window
from rooflax.nn.decoder import Decoder

GGUF = GGUFSpec("qwen2", biases={}, square=True)
TINY = common.tiny(
    "head_dim", hidden_size=48, num_hidden_layers=4, num_key_value_heads=3, rms_norm_eps=1e-6
)


def config_from_hf(reader: ConfigReader) -> Decoder:
    attention = common.read_attention(reader, norm_eps=1e-6, kv_heads=32, qkv_bias=True)
    windows = read_windows(reader)
    return common.read_dense(reader, attention, windows=windows, max_position=32_768)


def read_windows(reader: ConfigReader) -> common.Windows:
    """`layer_types` if given, else windows in the layers from `max_window_layers` on."""
    count = common.num_layers(reader)
    reader.get("sliding_window", None)
    first = reader.size("max_window_layers", 28, least=0)
    default = common.layer_types(tuple(None if i < first else 1 for i in range(count)))
    types = reader.layer_types(count, default)
    if not reader.flag("use_sliding_window", False):
        return (None,) * count
    window = read_window(reader, 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def write_windows(windows: common.Windows) -> dict[str, Any]:
    window = next((w for w in windows if w), None)
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": common.layer_types(windows),
    }


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "qwen2", "Qwen2ForCausalLM")
    return written | write_windows(common.windows_of(decoder))
