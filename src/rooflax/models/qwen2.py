"""Qwen 2 and 2.5: LLaMA with biases on q, k and v, and optional windows in the upper layers.

Source: transformers, models/qwen2/modeling_qwen2.py; Qwen Team, Qwen2.5 Technical Report, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models.common import (
    Windows,
    layer_types,
    num_layers,
    read_attention,
    read_decoder,
    read_mlp,
    read_rope,
    windows_of,
    write_decoder,
)
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer


def config_from_hf(reader: ConfigReader) -> Decoder:
    attention = read_attention(reader, norm_eps=1e-6, qkv_bias=True)
    attention = replace(attention, rope=read_rope(reader, attention.head_dim))
    mlp = read_mlp(reader, attention.norm)
    layers = (Layer(replace(attention, window=w), mlp) for w in read_windows(reader))
    return read_decoder(reader, layers, max_position=32_768)


def read_windows(reader: ConfigReader) -> Windows:
    """`layer_types` if given, else windows in the layers from `max_window_layers` on."""
    count = num_layers(reader)
    reader.get("sliding_window", None)
    first = reader.size("max_window_layers", 28, least=0)
    default = layer_types(tuple(None if i < first else 1 for i in range(count)))
    types = reader.layer_types(count, default)
    if not reader.flag("use_sliding_window", False):
        return (None,) * count
    window = reader.size("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def write_windows(windows: Windows) -> dict[str, Any]:
    window = next((w for w in windows if w), None)
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": layer_types(windows),
    }


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = write_decoder(decoder, "qwen2", "Qwen2ForCausalLM")
    return written | write_windows(windows_of(decoder))
