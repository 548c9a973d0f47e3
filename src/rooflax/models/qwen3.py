"""Qwen 3: Qwen 2 with an RMSNorm of every query and key head, and biases only where stated.

Source: transformers, models/qwen3/modeling_qwen3.py; Qwen Team, Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.qwen2 import read_windows, write_windows
from rooflax.nn.decoder import Decoder

GGUF = GGUFSpec("qwen3")
TINY = common.tiny(num_hidden_layers=4, rms_norm_eps=1e-6)


def config_from_hf(reader: ConfigReader) -> Decoder:
    sizes = {"norm_eps": 1e-6, "kv_heads": 32, "head_dim": 128}
    attention = common.read_attention(reader, **sizes, **common.read_biases(reader))
    attention = replace(attention, qk_norm=attention.norm.eps)
    windows = read_windows(reader)
    return common.read_dense(reader, attention, windows=windows, max_position=32_768)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "qwen3", "Qwen3ForCausalLM")
    bias = {"attention_bias": decoder.layers[0].attention.qkv_bias}
    return written | write_windows(common.windows_of(decoder)) | bias
