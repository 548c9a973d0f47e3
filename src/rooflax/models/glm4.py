"""GLM-4-0414 (9B and 32B, also Z1): norms around each branch, RoPE of neighbours in half a head.

Biases on q, k and v, and one tensor for gate and up.

Source: transformers, models/glm4/modeling_glm4.py; GLM Team, ChatGLM, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.phi3 import GATE_UP
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import SANDWICH

LAYER = "model.layers.{i}"
NAMES = TensorNames(
    (
        GATE_UP,
        ("layers.{i}.attn.post_norm", StoredAs(f"{LAYER}.post_self_attn_layernorm.weight")),
        ("layers.{i}.mlp.norm", StoredAs(f"{LAYER}.post_attention_layernorm.weight")),
        ("layers.{i}.mlp.post_norm", StoredAs(f"{LAYER}.post_mlp_layernorm.weight")),
    )
)
GGUF = GGUFSpec("glm4", partial=True)
TINY = common.tiny(attention_bias=True, head_dim=24, pad_token_id=0)


def config_from_hf(reader: ConfigReader) -> Decoder:
    sizes = {"norm_eps": 1.5625e-7, "kv_heads": 2, "head_dim": 128, "partial": 0.5}
    parts = {"wiring": SANDWICH, "interleaved": True}
    bias = reader.flag("attention_bias", True)
    attention = common.read_attention(reader, **sizes, **parts, qkv_bias=bias)
    return replace(common.read_dense(reader, attention, max_position=131_072), names=NAMES)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "glm4", "Glm4ForCausalLM")
    biases = {"attention_bias": attention.qkv_bias}
    return written | biases | common.rotary_share(decoder)
