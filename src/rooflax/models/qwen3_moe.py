"""Qwen 3 MoE: Qwen 3 with experts in place of the feed-forward network, in all layers or in some.

Source: transformers, models/qwen3_moe/modeling_qwen3_moe.py; Qwen Team, Qwen3 Technical Report,
2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, EXPERTS
from rooflax.models.mistral import read_window
from rooflax.models.sparse import read_mlps, read_sparse_layers, write_mlps
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer

STATED = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
"""Keys of Qwen3-Coder's files that transformers does not read, and what it computes."""
GGUF = GGUFSpec("qwen3moe", keys=COMMON | EXPERTS, stated={"norm_topk_prob": True})
TINY = common.tiny(
    num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
    hidden_size=56, rms_norm_eps=1e-6,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    for key, only in STATED.items():
        reader.expect(key, only)
    biases = common.read_biases(reader)
    attention = common.read_attention(reader, norm_eps=1e-6, kv_heads=4, **biases)
    window = read_window(reader, 4096)
    window = window if reader.flag("use_sliding_window", False) else None
    reader.get("max_window_layers", None)  # files have it; it changes nothing
    attention = replace(attention, qk_norm=attention.norm.eps, window=window)
    dense, sparse = read_mlps(reader, attention.norm)
    mlps = (sparse if has else dense for has in read_sparse_layers(reader))
    layers = (Layer(attention, mlp) for mlp in mlps)
    return common.read_decoder(reader, layers, max_position=32_768)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "qwen3_moe", "Qwen3MoeForCausalLM")
    return (
        written
        | write_mlps(decoder)
        | {
            "attention_bias": attention.qkv_bias,
            "sliding_window": attention.window,
            "use_sliding_window": attention.window is not None,
        }
    )
