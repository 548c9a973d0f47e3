"""Seed-OSS: LLaMA with biases on q, k and v, and heads wider than their share of the hidden size.

Source: transformers, models/seed_oss/modeling_seed_oss.py.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import BIASES, POST_NORM
from rooflax.models.llama import write_biases
from rooflax.nn.decoder import Decoder

GGUF = GGUFSpec(
    "seed_oss", biases=BIASES | {"attention_out_bias": "attn_output"}, tensors=POST_NORM
)
TINY = common.tiny(attention_bias=True, attention_out_bias=False, mlp_bias=False)


def config_from_hf(reader: ConfigReader) -> Decoder:
    attention = common.read_attention(
        reader,
        norm_eps=1e-6,
        kv_heads=8,
        head_dim=None if reader.has("head_dim") else 128,
        qkv_bias=reader.flag("attention_bias", True),
        output_bias=reader.flag("attention_out_bias", False),
    )
    mlp_bias = reader.flag("mlp_bias", False)
    return common.read_dense(reader, attention, mlp_bias=mlp_bias, max_position=524_288)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "seed_oss", "SeedOssForCausalLM") | write_biases(
        decoder
    )
    return written | {"attention_out_bias": decoder.layers[0].attention.output_bias}
