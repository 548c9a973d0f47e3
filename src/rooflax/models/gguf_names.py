"""Metadata keys and tensor names that the GGUF files of several families have.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, conversion/ and src/models/.
"""

from __future__ import annotations

from rooflax.models.gguf_changes import KEEP, Change, Halves, LessOne, Row
from rooflax.nn.parts import ATTENTION, MLP

Table = dict[str, tuple[tuple[str, ...], Change]]
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


def renamed(*pairs: tuple[str, str]) -> Table:
    """Weights and biases that only change their name."""
    return {
        f"{name}.{end}": ((f"{stored}.{end}",), KEEP)
        for name, stored in pairs
        for end in ("weight", "bias")
    }


def experts(router: str, expert: str, gate: str, up: str, down: str) -> Table:
    """A router, and experts whose tensors are parts of stacks."""
    parts = ((gate, "gate"), (up, "up"), (down, "down"))
    return renamed((f"{router}.gate", "blk.{i}.ffn_gate_inp")) | {
        f"{expert}.{part}.weight": ((f"blk.{{i}}.ffn_{stored}_exps.weight",), KEEP)
        for part, stored in parts
    }


def shared_expert(name: str) -> Table:
    parts = ("gate", "up", "down")
    return renamed(*((f"{MLP}.{name}.{p}_proj", f"blk.{{i}}.ffn_{p}_shexp") for p in parts))


def less_one(table: Table) -> Table:
    """A table whose norms the converter adds one to."""
    return {
        name: (stored, LessOne() if "norm.weight" in name else change)
        for name, (stored, change) in table.items()
    }


LAYERS = renamed(
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.{i}.input_layernorm", "blk.{i}.attn_norm"),
    (f"{ATTENTION}.q_proj", "blk.{i}.attn_q"),
    (f"{ATTENTION}.k_proj", "blk.{i}.attn_k"),
    (f"{ATTENTION}.v_proj", "blk.{i}.attn_v"),
    (f"{ATTENTION}.o_proj", "blk.{i}.attn_output"),
    (f"{ATTENTION}.q_norm", "blk.{i}.attn_q_norm"),
    (f"{ATTENTION}.k_norm", "blk.{i}.attn_k_norm"),
)
"""The ends of a model, and attention with a norm before it."""
DENSE = LAYERS | renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    (f"{MLP}.gate_proj", "blk.{i}.ffn_gate"),
    (f"{MLP}.up_proj", "blk.{i}.ffn_up"),
    (f"{MLP}.down_proj", "blk.{i}.ffn_down"),
)
"""LLaMA's tensors."""
FUSED = LAYERS | renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    (f"{MLP}.gate_up_proj", "blk.{i}.ffn_up"),
    (f"{MLP}.down_proj", "blk.{i}.ffn_down"),
)
POST_NORM = renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.post_attention_norm"),
)
SANDWICH_NORMS = DENSE | POST_NORM | renamed(
    ("model.layers.{i}.pre_feedforward_layernorm", "blk.{i}.ffn_norm"),
    ("model.layers.{i}.post_feedforward_layernorm", "blk.{i}.post_ffw_norm"),
)  # fmt: skip
MLP_EXPERTS = experts(MLP, f"{MLP}.experts.{{e}}", "gate_proj", "up_proj", "down_proj")
GATED_SHARED_EXPERT = shared_expert("shared_expert") | {
    f"{MLP}.shared_expert_gate.weight": (("blk.{i}.ffn_gate_inp_shexp.weight",), Row())
}
GATE, UP, DOWN = (f"blk.{{i}}.ffn_{part}_exps" for part in ("gate", "up", "down"))
STACKED_EXPERTS = renamed((f"{MLP}.gate", "blk.{i}.ffn_gate_inp")) | {
    f"{MLP}.experts.gate_up_proj": ((f"{GATE}.weight", f"{UP}.weight"), Halves()),
    f"{MLP}.experts.down_proj": ((f"{DOWN}.weight",), KEEP),
}
