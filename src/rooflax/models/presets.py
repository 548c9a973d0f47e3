"""Named architectures with random weights, for measuring: `preset:NAME`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooflax.errors import RequestError, did_you_mean

PREFIX = "preset:"
EMBEDDED_NAME, CHAT_NAME = EMBEDDED = ("rooflax-python-5m", "rooflax-chat-5m")
"""Models inside the package: the default, and that of a conversation."""
SEED = 0
"""Of every preset's weights: the same on every run."""


def _gpt2(width: int, layers: int, heads: int, **more: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
        "n_embd": width, "n_layer": layers, "n_head": heads, **more,
    }  # fmt: skip


def _qwen2(width: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict:
    return {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0, "tie_word_embeddings": True, **more,
    }  # fmt: skip


def _llama3(width: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "rope_scaling": scaling, **more,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": experts,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


def _lfm2(width: int, mlp: int, heads: int, **more: Any) -> dict[str, Any]:
    full = (2, 5, 8, 10, 12, 14)
    return {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": width, "block_ff_dim": mlp,
        "num_hidden_layers": 16, "num_attention_heads": heads, "num_key_value_heads": 8,
        "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "layer_types": ["full_attention" if i in full else "conv" for i in range(16)], **more,
    }  # fmt: skip


def _qwen3_5(width: int, mlp: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    return {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_parameters": rope,
        "full_attention_interval": 4, **more,
    }  # fmt: skip


def _gemma4(width: int, mlp: int, layers: int, heads: int, every: int, **more: Any) -> dict:
    """Each `every`-th layer is without a window."""
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    return {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": 256, "global_head_dim": 512, "layer_types": kinds,
        "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, **more,
    }  # fmt: skip


_GEMMA4_KV = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144}
_BFLOAT16 = {"torch_dtype": "bfloat16"}
_LLAMA32_SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, **_BFLOAT16),
    "llama-3.2-1b": _llama3(
        2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_scaling=_LLAMA32_SCALING,
        **_BFLOAT16,
    ),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, **_BFLOAT16),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, **_BFLOAT16),
    "lfm2-350m": _lfm2(1024, 6656, 16, **_BFLOAT16),
    "qwen3.5-0.8b": _qwen3_5(
        1024, 3584, 24, 8, num_key_value_heads=2, head_dim=256, linear_num_value_heads=16,
        tie_word_embeddings=True, **_BFLOAT16,
    ),
    "gemma-4-e2b": _gemma4(
        1536, 6144, 35, 8, 5, num_key_value_heads=1, num_kv_shared_layers=20,
        use_double_wide_mlp=True, hidden_size_per_layer_input=256, sliding_window=512, **_BFLOAT16,
    ),
    "gemma-4-26b-a4b": _gemma4(
        2816, 2112, 30, 16, 6, num_key_value_heads=8, num_global_key_value_heads=2,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        **_GEMMA4_KV, **_BFLOAT16,
    ),
    "gemma-4-31b": _gemma4(
        5376, 21504, 60, 32, 6, num_key_value_heads=16, num_global_key_value_heads=4,
        **_GEMMA4_KV, **_BFLOAT16,
    ),
    "seed-oss-36b": {
        "model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120,
        "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
        "rope_theta": 10_000_000.0, "attention_bias": True, "attention_out_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, **_BFLOAT16,
    },
    "gpt-oss-20b": _gpt_oss(24, 32, **_BFLOAT16),
    "gpt-oss-120b": _gpt_oss(36, 128, **_BFLOAT16),
    "gpt-oss-3b": _gpt_oss(4, 32, vocab_size=32768, **_BFLOAT16),
    "gpt2-tiny": _gpt2(128, 4, 4, vocab_size=4096),
    "qwen2.5-tiny": _qwen2(128, 512, 4, 4, 2, vocab_size=4096),
    "gpt-oss-tiny": _gpt_oss(
        4, 8, vocab_size=4096, hidden_size=128, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    ),
}  # fmt: skip
PRESETS |= json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
PRESETS["qwen3-moe-3b"] = PRESETS["qwen3-30b-a3b"] | {"num_hidden_layers": 4, "vocab_size": 32768}
"""Each as the config.json of the model it is named after, but for GPT-OSS's MXFP4 (-q mxfp4);
gpt-oss-3b and qwen3-moe-3b have four layers of the larger model and a small vocabulary. Tiny ones
are float32. Those of presets.json are published files (tests/data/published_configs has them whole,
with their sources), without what no computation reads; of wrappers their text part."""


def preset_config(model: str) -> dict[str, Any]:
    """The config.json of "preset:NAME".

    Raises:
        RequestError: no such preset.
    """
    name = model.removeprefix(PREFIX)
    if name not in PRESETS:
        meant = did_you_mean(name, PRESETS)
        raise RequestError(f"There is no preset {name!r:.80}{meant}; `rooflax models` lists them.")
    return PRESETS[name]
