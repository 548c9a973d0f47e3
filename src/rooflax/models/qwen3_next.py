"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in the others, experts.

Source: transformers, models/qwen3_next/modeling_qwen3_next.py; Qwen Team, Qwen3-Next, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common, mixers
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, EXPERTS, POST_NORM, SHARED_EXPERT, SHARED_EXPERT_GATE
from rooflax.models.sparse import read_mlps, read_sparse_layers, write_mlps
from rooflax.nn.decoder import Decoder

SKIPPED = r"mtp\..*"
"""Tensors of a further head that drafts tokens."""
GGUF = GGUFSpec(
    "qwen3next", keys=COMMON | EXPERTS | SHARED_EXPERT | mixers.KEYS,
    stated={"norm_topk_prob": True}, partial=True, read=mixers.read_gguf, write=mixers.write_gguf,
    tensors=lambda decoder, _: POST_NORM | SHARED_EXPERT_GATE | mixers.delta_tensors(decoder),
    adds_one=True,
)  # fmt: skip
TINY = common.tiny(
    num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
    rms_norm_eps=1e-6, shared_expert_intermediate_size=40, **mixers.TINY,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.expect("use_sliding_window", False)
    reader.assume(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True)
    reader.assume(moe_intermediate_size=512, intermediate_size=5632)
    attention, delta = mixers.read_mixers(reader, kv_heads=2, fused=True)
    dense, sparse = read_mlps(reader, attention.norm)
    sparse = replace(sparse, shared=reader.size("shared_expert_intermediate_size", 512))
    mlps = [sparse if has else dense for has in read_sparse_layers(reader)]
    return mixers.read_layers(reader, attention, delta, mlps)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "qwen3_next", "Qwen3NextForCausalLM")
    biases = {"attention_bias": decoder.attention.qkv_bias}
    return written | write_mlps(decoder) | biases | mixers.write_mixers(decoder)
