"""Metadata keys and tensor names that the GGUF files of several families have.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, conversion/ and src/models/.
"""

from __future__ import annotations

from rooflax.models.gguf_changes import KEEP, Change, Row
from rooflax.nn.parts import MLP

NameTable = dict[str, tuple[tuple[str, ...], Change]]
"""By a checkpoint's name the stored tensors and their change; {i} is a layer, {e} an expert."""

COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}


ENDS = {
    "token_embd": ("model.embed_tokens", "transformer.wte"),
    "position_embd": ("transformer.wpe",),
    "output_norm": ("model.norm", "transformer.ln_f"),
    "token_embd_norm": ("model.embedding_norm",),
    "output": ("lm_head",),
    "per_layer_token_embd": ("model.embed_tokens_per_layer",),
    "per_layer_model_proj": ("model.per_layer_model_projection",),
    "per_layer_proj_norm": ("model.per_layer_projection_norm",),
}
LAYERS = {
    "attn_norm": ("input_layernorm", "operator_norm", "ln_1"),
    "attn_qkv": ("self_attn.qkv_proj", "attn.c_attn"),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj", "self_attn.out_proj", "attn.c_proj"),
    "attn_q_norm": ("self_attn.q_norm", "self_attn.q_layernorm", "self_attn.query_layernorm"),
    "attn_k_norm": ("self_attn.k_norm", "self_attn.k_layernorm", "self_attn.key_layernorm"),
    "attn_q_a": ("self_attn.q_a_proj",),
    "attn_q_a_norm": ("self_attn.q_a_layernorm",),
    "attn_q_b": ("self_attn.q_b_proj",),
    "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa",),
    "attn_kv_a_norm": ("self_attn.kv_a_layernorm",),
    "attn_kv_b": ("self_attn.kv_b_proj",),
    "post_attention_norm": ("post_self_attn_layernorm",),
    "shortconv.in_proj": ("conv.in_proj",),
    "shortconv.out_proj": ("conv.out_proj",),
    "ffn_norm": ("post_attention_layernorm", "pre_feedforward_layernorm", "ffn_norm", "ln_2"),
    "ffn_gate": ("mlp.gate_proj", "feed_forward.w1"),
    "ffn_up": ("mlp.up_proj", "mlp.gate_up_proj", "feed_forward.w3", "mlp.c_fc"),
    "ffn_down": ("mlp.down_proj", "feed_forward.w2", "shared_mlp.output_linear", "mlp.c_proj"),
    "post_ffw_norm": ("post_feedforward_layernorm", "post_mlp_layernorm"),
    "ffn_gate_inp": ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "router.proj"),
    "ffn_gate_exps": ("mlp.experts.{e}.gate_proj", "block_sparse_moe.experts.{e}.w1"),
    "ffn_up_exps": ("mlp.experts.{e}.up_proj", "block_sparse_moe.experts.{e}.w3"),
    "ffn_down_exps": ("mlp.experts.{e}.down_proj", "block_sparse_moe.experts.{e}.w2"),
    "ffn_gate_shexp": ("mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"),
    "ffn_up_shexp": ("mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"),
    "ffn_down_shexp": ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
    "inp_gate": ("per_layer_input_gate",),
    "proj": ("per_layer_projection",),
    "post_norm": ("post_per_layer_input_norm",),
    "pre_ffw_norm_2": ("pre_feedforward_layernorm_2",),
    "post_ffw_norm_1": ("post_feedforward_layernorm_1",),
    "post_ffw_norm_2": ("post_feedforward_layernorm_2",),
}


def renamed(*pairs: tuple[str, str]) -> NameTable:
    """Weights and biases that only change their name."""
    return {
        f"{name}.{end}": ((f"{stored}.{end}",), KEEP)
        for name, stored in pairs
        for end in ("weight", "bias")
    }


TENSORS = renamed(
    *((hf, stored) for stored, names in ENDS.items() for hf in names),
    *((f"{layer}.{hf}", f"blk.{{i}}.{stored}") for stored, names in LAYERS.items()
      for hf in names for layer in ("model.layers.{i}", "transformer.h.{i}")),
)  # fmt: skip
"""Names of all checkpoints: llama.cpp gives a tensor one name, whatever a family calls it."""
POST_NORM = renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.post_attention_norm"),
)
"""Families where that norm is not the feed-forward network's own, or is called so."""
GATE, UP, DOWN = (f"blk.{{i}}.ffn_{part}_exps" for part in ("gate", "up", "down"))
SHARED_EXPERT_GATE: NameTable = {
    f"{MLP}.shared_expert_gate.weight": (("blk.{i}.ffn_gate_inp_shexp.weight",), Row())
}
