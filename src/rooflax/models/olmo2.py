"""OLMo 2: LLaMA with norms on what each branch gives, and one of all query and of all key heads.

Source: transformers, models/olmo2/modeling_olmo2.py; OLMo Team, 2 OLMo 2 Furious, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import POST, Layer


def config_from_hf(reader: ConfigReader) -> Decoder:
    bias = {name: reader.flag("attention_bias", False) for name in ("qkv_bias", "output_bias")}
    attention = common.read_attention(reader, norm_eps=1e-5, **bias, wiring=POST, flat_norm=True)
    rope = common.read_rope(reader, attention.head_dim)
    attention = replace(attention, rope=rope, qk_norm=attention.norm.eps)
    mlp = replace(common.read_mlp(reader, attention.norm), wiring=POST)
    layers = [Layer(attention, mlp)] * common.num_layers(reader)
    return common.read_decoder(reader, layers, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "olmo2", "Olmo2ForCausalLM")
    return written | {"attention_bias": decoder.layers[0].attention.qkv_bias}
