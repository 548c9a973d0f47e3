"""LLaMA 2, 3, 3.1, 3.2: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Rejected: partial rotary dimensions, activations other than those of ops.activation.

Source: transformers, models/llama/modeling_llama.py; Touvron et al., LLaMA 2, 2023; Grattafiori et
al., The Llama 3 Herd of Models, 2024.
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
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp


def config_from_hf(reader: ConfigReader) -> Decoder:
    bias = reader.flag("attention_bias", False)
    attention = read_attention(reader, norm_eps=1e-6, qkv_bias=bias, output_bias=bias)
    attention = replace(attention, rope=read_rope(reader, attention.head_dim))
    mlp = read_mlp(reader, attention.norm, bias=reader.flag("mlp_bias", False))
    layers = (Layer(attention, mlp),) * num_layers(reader)
    return read_decoder(reader, layers, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    return write_decoder(decoder, "llama", "LlamaForCausalLM") | write_biases(decoder)


def write_biases(decoder: Decoder) -> dict[str, bool]:
    attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return {"attention_bias": attention.qkv_bias, "mlp_bias": mlp.bias}
