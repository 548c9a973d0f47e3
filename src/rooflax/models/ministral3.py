"""Ministral 3: Mistral with YaRN and an attention temperature by position (llama_4_scaling_beta).

Devstral 2 has a beta of 0, which changes nothing.

Source: transformers, models/ministral3/modeling_ministral3.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.mistral import read_window
from rooflax.models.rope_reader import read_rope
from rooflax.nn.decoder import Decoder

ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "mscale": 1.0,
    "original_max_position_embeddings": 16_384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""RoPE that transformers assumes where config.json says nothing of it."""
GGUF = GGUFSpec("mistral3", biases={}, scales_queries=True, permuted=True, output_bias=True)
TINY = common.tiny(
    "rope_theta",
    rope_parameters={
        "type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 10, "max_position_embeddings": 131, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
    },
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    if reader.get("rope_scaling", None) is None:
        reader.assume(rope_parameters=ROPE)
    head_dim = None if reader.has("head_dim") else 128
    parts = {"kv_heads": 8, "head_dim": head_dim, "theta": None}
    window = read_window(reader, None)
    attention = common.read_attention(reader, norm_eps=1e-5, window=window, **parts)
    rope = read_rope(reader, attention.head_dim, scales_queries=True)
    attention = replace(attention, rope=rope)
    return common.read_dense(reader, attention, max_position=262_144)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "ministral3", "Ministral3ForCausalLM")
    del written["rope_theta"], written["rope_scaling"]
    assert attention.rope
    rope = {"llama_4_scaling_beta": 0.0} | attention.rope.to_hf()
    return written | {"sliding_window": attention.window, "rope_parameters": rope}
