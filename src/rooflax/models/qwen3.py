"""Qwen 3: Qwen 2 with an RMSNorm of every query and key head, and biases only where stated.

Source: transformers, models/qwen3/modeling_qwen3.py; Qwen Team, Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models.common import (
    read_attention,
    read_decoder,
    read_mlp,
    read_rope,
    windows_of,
    write_decoder,
)
from rooflax.models.config_reader import ConfigReader
from rooflax.models.qwen2 import read_windows, write_windows
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer


def config_from_hf(reader: ConfigReader) -> Decoder:
    bias = reader.flag("attention_bias", False)
    sizes = {"norm_eps": 1e-6, "kv_heads": 32, "head_dim": 128}
    attention = read_attention(reader, **sizes, qkv_bias=bias, output_bias=bias)
    rope = read_rope(reader, attention.head_dim)
    attention = replace(attention, rope=rope, qk_norm=attention.norm.eps)
    mlp = read_mlp(reader, attention.norm)
    layers = (Layer(replace(attention, window=w), mlp) for w in read_windows(reader))
    return read_decoder(reader, layers, max_position=32_768)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = write_decoder(decoder, "qwen3", "Qwen3ForCausalLM")
    bias = {"attention_bias": decoder.layers[0].attention.qkv_bias}
    return written | write_windows(windows_of(decoder)) | bias
