"""ERNIE 4.5, dense: LLaMA with RoPE of neighbouring dimensions.

Source: transformers, models/ernie4_5/modeling_ernie4_5.py; Baidu, ERNIE 4.5, 2025.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.nn.decoder import Decoder

GGUF = GGUFSpec("ernie4_5", biases={"use_bias": "attn_q"}, output_bias=True)
TINY = common.tiny(tie_word_embeddings=True)


def config_from_hf(reader: ConfigReader) -> Decoder:
    bias = reader.flag("use_bias", False)
    sizes = {"kv_heads": 2, "head_dim": None if reader.has("head_dim") else 128}
    parts = {"theta": 500_000.0, "interleaved": True, "qkv_bias": bias, "output_bias": bias}
    attention = common.read_attention(reader, norm_eps=1e-5, **sizes, **parts)
    defaults = {"max_position": 131_072, "tied_embeddings": True}
    return common.read_dense(reader, attention, mlp_bias=bias, **defaults)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "ernie4_5", "Ernie4_5ForCausalLM")
    return written | {"use_bias": decoder.layers[0].attention.qkv_bias}
