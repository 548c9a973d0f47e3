"""OLMo 3: OLMo 2 with a window in three of four layers; RoPE is scaled in the others alone.

Source: transformers, models/olmo3/modeling_olmo3.py; OLMo Team, Olmo 3, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, ToldBy
from rooflax.models.gguf_names import COMMON, POST_NORM, WINDOW
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer
from rooflax.nn.wiring import POST

THETA = 500_000.0
GGUF = GGUFSpec(
    "olmo2", told_by=ToldBy("olmo2", "attention.sliding_window", bool), keys=COMMON | WINDOW,
    tensors=POST_NORM, square=True, tied=False,
)  # fmt: skip
TINY = common.tiny(
    "head_dim", hidden_size=60, sliding_window=7, num_hidden_layers=4, rope_theta=500_000.0,
    rope_scaling={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.2,
    },
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    options = common.read_biases(reader) | {"wiring": POST, "flat_norm": True, "theta": None}
    attention = common.read_attention(reader, norm_eps=1e-5, **options)
    attention = replace(attention, qk_norm=attention.norm.eps)
    ropes = common.read_kinds_ropes(reader, attention.head_dim, THETA, THETA)
    window = reader.size("sliding_window", 4096)
    mlp = replace(common.read_mlp(reader, attention.norm), wiring=POST)
    full = Layer(replace(attention, rope=ropes[0]), mlp)
    local = Layer(replace(attention, rope=ropes[1], window=window), mlp)
    layers = common.read_kinds(reader, full, local, 4)
    return common.read_decoder(reader, layers, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    return common.write_nested(decoder, "olmo3", "Olmo3ForCausalLM")
