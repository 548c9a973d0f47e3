"""Granite 3, dense: LLaMA with four multipliers.

Source: transformers, models/granite/modeling_granite.py; IBM, Granite 3.0 Language Models, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.llama import write_biases
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Wiring


def config_from_hf(reader: ConfigReader) -> Decoder:
    wiring = Wiring(scale=reader.number("residual_multiplier", 1.0))
    bias = {name: reader.flag("attention_bias", False) for name in ("qkv_bias", "output_bias")}
    attention = common.read_attention(reader, norm_eps=1e-6, **bias, wiring=wiring)
    rope = common.read_rope(reader, attention.head_dim)
    scale = reader.number("attention_multiplier", 1.0)  # of the scores, not of head_dim^-1/2
    mlp = common.read_mlp(reader, attention.norm, bias=reader.flag("mlp_bias", False))
    layer = Layer(replace(attention, rope=rope, scale=scale), replace(mlp, wiring=wiring))
    layers = [layer] * common.num_layers(reader)
    return replace(
        common.read_decoder(reader, layers, max_position=2048),
        embed_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=1 / reader.number("logits_scaling", 1.0),
    )


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "granite", "GraniteForCausalLM")
    return (
        written
        | write_biases(decoder)
        | {
            "attention_multiplier": attention.scale,
            "residual_multiplier": attention.wiring.scale,
            "embedding_multiplier": decoder.embed_scale,
            "logits_scaling": 1 / decoder.logit_scale,
        }
    )
