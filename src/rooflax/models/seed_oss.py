"""Seed-OSS: LLaMA with biases on q, k and v, and heads wider than their share of the hidden size.

Source: transformers, models/seed_oss/modeling_seed_oss.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models.common import (
    num_layers,
    read_attention,
    read_decoder,
    read_mlp,
    read_rope,
    write_decoder,
)
from rooflax.models.config_reader import ConfigReader
from rooflax.models.llama import write_biases
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer


def config_from_hf(reader: ConfigReader) -> Decoder:
    qkv, output = reader.flag("attention_bias", True), reader.flag("attention_out_bias", False)
    sizes = {"kv_heads": 8, "head_dim": None if reader.given("head_dim") else 128}
    attention = read_attention(reader, norm_eps=1e-6, **sizes, qkv_bias=qkv, output_bias=output)
    attention = replace(attention, rope=read_rope(reader, attention.head_dim))
    mlp = read_mlp(reader, attention.norm, bias=reader.flag("mlp_bias", False))
    return read_decoder(reader, [Layer(attention, mlp)] * num_layers(reader), max_position=524_288)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = write_decoder(decoder, "seed_oss", "SeedOssForCausalLM") | write_biases(decoder)
    return written | {"attention_out_bias": decoder.layers[0].attention.output_bias}
