"""GLM-4.5 to 4.7: experts chosen by sigmoids and a bias, and shared experts.

The first layers have no experts; RoPE turns a part of each head. The layer that predicts further
tokens is skipped. The file is longer than others, since DeepSeek's families use its names and its
reading of those layers. Rejected: groups of experts.

Source: transformers, models/glm4_moe/modeling_glm4_moe.py; GLM-4.5 Team, GLM-4.5, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, MetadataReader, Raw
from rooflax.models.gguf_changes import KEEP
from rooflax.models.gguf_names import COMMON, POST_NORM, NameTable
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import MLP, Layer, Mlp, Moe
from rooflax.nn.weights import StoredAs

SHARED, KEY = f"{MLP}.shared_experts", "layers.{i}.mlp.shared_"
BOTH = (f"{SHARED}.gate_proj.weight", f"{SHARED}.up_proj.weight")
NAMES = TensorNames(
    ((f"{KEY}gate_up", StoredAs(BOTH)), (f"{KEY}down", StoredAs(f"{SHARED}.down_proj.weight")))
)
KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
CHOICE_BIAS: NameTable = {
    f"{MLP}.gate.e_score_correction_bias": (("blk.{i}.exp_probs_b.bias",), KEEP)
}  # fmt: skip
TINY = common.tiny(
    head_dim=24, hidden_size=56, n_routed_experts=5, num_experts_per_tok=3,
    moe_intermediate_size=32, n_shared_experts=2, routed_scaling_factor=1.5, attention_bias=True,
    use_qk_norm=True, first_k_dense_replace=1, tie_word_embeddings=True,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    for key in ("n_group", "topk_group"):
        reader.expect(key, 1)
    bias = reader.flag("attention_bias", False)
    attention = common.read_attention(reader, qkv_bias=bias, norm_eps=1e-5, kv_heads=8, partial=0.5)
    if reader.flag("use_qk_norm", False):
        attention = replace(attention, qk_norm=attention.norm.eps)
    dense = replace(common.read_mlp(reader, attention.norm, 10_944), key="dense_mlp")
    sizes = common.read_experts(reader, "n_routed_experts", 128, 8)
    width = reader.size("moe_intermediate_size", 1408)
    sparse = Moe(
        *sizes, width, attention.norm, dense.activation, biased=True, shared_gated=False,
        renormalise=reader.flag("norm_topk_prob", True),
        shared=width * reader.size("n_shared_experts", 1),
        scale=reader.number("routed_scaling_factor", 1.0),
    )  # fmt: skip
    first = reader.size("first_k_dense_replace", 1, least=0)
    mlps = (dense if i < first else sparse for i in range(common.num_layers(reader)))
    layers = [Layer(attention, mlp) for mlp in mlps]
    names = read_further(reader)
    return replace(common.read_decoder(reader, layers, max_position=131_072), names=names)


def read_further(reader: ConfigReader) -> TensorNames:
    """Number of layers that predict further tokens."""
    old, new = "num_nextn_predict_layers", "num_mtp_layers"
    count = reader.size(new, reader.size(old, 1, least=0, most=64), least=0, most=64)
    return replace(NAMES, further=count)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    moe, attention = decoder.moe, decoder.layers[0].attention
    assert moe is not None
    return common.write_decoder(decoder, "glm4_moe", "Glm4MoeForCausalLM") | {
        "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.width, "n_shared_experts": moe.shared // moe.width,
        "norm_topk_prob": moe.renormalise, "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": sum(isinstance(layer.mlp, Mlp) for layer in decoder.layers),
        "num_nextn_predict_layers": decoder.names.further,
        "attention_bias": attention.qkv_bias, "use_qk_norm": attention.qk_norm is not None,
    } | common.rotary_share(decoder)  # fmt: skip


def _read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    reader.expect("expert_gating_func", 2)  # sigmoids
    for key in ("expert_group_count", "expert_group_used_count"):
        reader.expect(key, 1)
    count = reader.count_without(raw.get("num_nextn_predict_layers", 0), raw)
    has_norms = "blk.0.attn_q_norm.weight" in reader.file.names()
    return count | {"use_qk_norm": has_norms} | reader.attention(raw)


GGUF = GGUFSpec(
    "glm4moe", keys=COMMON | KEYS, partial=True, tensors=POST_NORM | CHOICE_BIAS,
    read=_read_gguf,
)  # fmt: skip
