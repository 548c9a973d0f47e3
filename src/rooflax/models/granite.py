"""Granite 3, dense: LLaMA with four multipliers.

Source: transformers, models/granite/modeling_granite.py; IBM, Granite 3.0 Language Models, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import BIASES, COMMON
from rooflax.models.llama import write_biases
from rooflax.nn.decoder import Decoder
from rooflax.nn.wiring import Wiring

SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
WAIVED = ("ssm.*", "expert_shared_feed_forward_length")
"""Keys of layers that are not there."""
GGUF = GGUFSpec(
    "granite", keys=COMMON | SCALES, required=("logit_scale",), biases=BIASES, waived=WAIVED,
    permuted=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
TINY = common.tiny(
    "head_dim", hidden_size=60, attention_multiplier=0.4, embedding_multiplier=3.0,
    residual_multiplier=0.7, logits_scaling=1.6,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    parts = common.read_biases(reader) | {
        "wiring": Wiring(scale=reader.number("residual_multiplier", 1.0)),
        "scale": reader.number("attention_multiplier", 1.0),  # of the scores, not of head_dim^-1/2
    }
    attention = common.read_attention(reader, norm_eps=1e-6, **parts)
    mlp_bias = reader.flag("mlp_bias", False)
    return replace(
        common.read_dense(reader, attention, mlp_bias=mlp_bias, max_position=2048),
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
