"""Qwen 1.5 and 2 MoE (A2.7B, 57B-A14B): Qwen 2 with experts, and a gated shared expert.

Source: transformers, models/qwen2_moe/modeling_qwen2_moe.py; Qwen Team, Qwen2 Technical Report,
2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common, qwen3_moe
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE
from rooflax.models.qwen2 import write_windows
from rooflax.models.sparse import read_mlps, read_sparse_layers, write_mlps
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer

GGUF = GGUFSpec(
    "qwen2moe", keys=COMMON | EXPERTS | SHARED_EXPERT, biases={"qkv_bias": "attn_q"},
    tensors=SHARED_EXPERT_GATE, square=True, tied=False,
)  # fmt: skip
TINY = qwen3_moe.TINY | {"norm_topk_prob": False, "shared_expert_intermediate_size": 40}


def config_from_hf(reader: ConfigReader) -> Decoder:
    bias = reader.flag("qkv_bias", True)
    attention = common.read_attention(reader, norm_eps=1e-6, kv_heads=16, qkv_bias=bias)
    sizes = {"dense": 5632, "width": 1408, "experts": 60, "chosen": 4}
    dense, sparse = read_mlps(reader, attention.norm, **sizes)
    sparse = replace(sparse, shared=reader.size("shared_expert_intermediate_size", 5632))
    mlps = [sparse if has else dense for has in read_sparse_layers(reader)]
    layers = (
        Layer(replace(attention, window=window), mlp)
        for window, mlp in zip(_read_windows(reader, len(mlps)), mlps, strict=True)
    )
    return common.read_decoder(reader, layers, max_position=32_768)


def _read_windows(reader: ConfigReader, count: int) -> common.Windows:
    """As transformers has them: every other one of the first `max_window_layers`."""
    first = reader.size("max_window_layers", 28, least=0)
    reader.get("sliding_window", None)
    is_used = reader.flag("use_sliding_window", False)
    local = tuple(1 if is_used and i % 2 == 0 and i < first else None for i in range(count))
    if not is_used:
        reader.layer_types(count, common.layer_types(local))
        return (None,) * count
    types = common.windowed_types(reader, common.layer_types(local))
    window = reader.size("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    moe = decoder.moe
    assert moe is not None
    written = common.write_decoder(decoder, "qwen2_moe", "Qwen2MoeForCausalLM")
    written |= write_mlps(decoder) | write_windows(common.windows_of(decoder))
    return written | {
        "qkv_bias": decoder.layers[0].attention.qkv_bias,
        "shared_expert_intermediate_size": moe.shared,
    }
