"""Qwen 3.5 and 3.6's text model with experts: a shared one beside those chosen, in all layers.

Source: transformers, models/qwen3_5_moe/modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common, mixers, qwen3_next
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_changes import KEEP, Halves
from rooflax.models.gguf_names import (
    COMMON,
    DOWN,
    EXPERTS,
    GATE,
    POST_NORM,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    UP,
)
from rooflax.models.qwen3_5_text import HF_PREFIXES, SKIPPED, SKIPPED_KEYS
from rooflax.models.sparse import read_mlps
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import MLP

__all__ = ["HF_PREFIXES", "SKIPPED", "config_from_hf", "config_to_hf"]

GGUF = GGUFSpec(
    "qwen35moe", partial=True, read=mixers.read_gguf, write=mixers.write_image_gguf,
    keys={key: hf for key, hf in COMMON.items() if key != "feed_forward_length"}
    | EXPERTS | SHARED_EXPERT | mixers.KEYS,
    adds_one=True,
    tensors=lambda decoder, _: POST_NORM | SHARED_EXPERT_GATE | mixers.delta_tensors(decoder) | {
        f"{MLP}.experts.gate_up_proj": ((f"{GATE}.weight", f"{UP}.weight"), Halves()),
        f"{MLP}.experts.down_proj": ((f"{DOWN}.weight",), KEEP),
    },
)  # fmt: skip
TINY = common.tiny(
    "intermediate_size", num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32,
    rms_norm_eps=1e-6, shared_expert_intermediate_size=40, **mixers.TINY,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    reader.expect("mlp_only_layers", [])
    reader.expect("norm_topk_prob", True)
    reader.assume(num_experts=256, moe_intermediate_size=512, norm_topk_prob=True)
    attention, delta = mixers.read_mixers(reader, kv_heads=2)
    _, moe = read_mlps(reader, attention.norm)
    width = reader.size("shared_expert_intermediate_size", 512)
    mlps = [replace(moe, shared=width, stacked=True)] * common.num_layers(reader)
    return mixers.read_layers(reader, attention, delta, mlps)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    names = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    written = qwen3_next.config_to_hf(decoder) | names
    for key in ("mlp_only_layers", "intermediate_size", "norm_topk_prob"):
        del written[key]
    return written
