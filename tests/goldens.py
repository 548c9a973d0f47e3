"""Tiny checkpoints of every family and what transformers computes from them.

A tensor's values are a function of its name and shape, so a checkpoint is its config and a list
of names; only what transformers says of it must be kept. `python -m tests.goldens` writes that to
tests/data/goldens (needs torch and transformers); the tests ask transformers itself where it is
installed, and read the files where it is not.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.marks import cases

FOLDER = Path(__file__).parent / "data" / "goldens"
HAVE_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))

VOCAB = 263
NEW_TOKENS = 64
SEQ = 41
KEPT_POSITIONS = (0, 9, 25, 40)
"""Positions whose logits are committed; a live reference has them all."""

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 54, "intermediate_size": 104, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
    "max_position_embeddings": 131, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 131,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 1000.0,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
    "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7,
    "max_position_embeddings": 131, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": True, "rope_theta": 150.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 12,
    },
}  # fmt: skip

_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 54, "intermediate_size": 104, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
    "max_position_embeddings": 131, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_theta": 1000.0,
}  # fmt: skip
_SMOLLM3 = {
    "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 60, "intermediate_size": 104, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 131,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_theta": 1000.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_MISTRAL = _LLAMA | {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7,
    "rope_theta": 1000.0,
}  # fmt: skip
_SEED_OSS = _LLAMA | {
    "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "rope_theta": 1000.0,
    "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
}  # fmt: skip

_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "hidden_size": 56,
    "num_hidden_layers": 3,
}  # fmt: skip
_MIXTRAL = _LLAMA | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 5,
    "num_experts_per_tok": 2, "intermediate_size": 32, "rope_theta": 1000.0, "hidden_size": 56,
}  # fmt: skip

_GEMMA3 = _LLAMA | {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 28, "sliding_window": 7, "sliding_window_pattern": 3,
    "rope_theta": 1000.0, "rope_local_base_freq": 100.0,
}  # fmt: skip
del _GEMMA3["hidden_act"]

_GRANITE = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {
    "model_type": "granite", "architectures": ["GraniteForCausalLM"], "hidden_size": 60,
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
    "logits_scaling": 1.6, "rope_theta": 1000.0,
}  # fmt: skip

_OLMO2 = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 60,
    "rope_theta": 1000.0,
}  # fmt: skip

_PHI3 = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 60,
    "rope_theta": 1000.0, "pad_token_id": 0,
}  # fmt: skip
_LONGROPE = {
    "type": "longrope", "short_factor": [1.0, 1.25, 2.0, 4.0], "long_factor": [1.5, 3.0, 9.0, 33.0],
}  # fmt: skip

_GLM4 = _LLAMA | {
    "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "rope_theta": 1000.0,
    "attention_bias": True, "head_dim": 24, "pad_token_id": 0,
}  # fmt: skip
_ERNIE = _LLAMA | {
    "model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}  # fmt: skip

_EXAONE4 = _LLAMA | {
    "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "rope_theta": 1000.0,
    "sliding_window": 7, "num_hidden_layers": 4, "sliding_window_pattern": 2,
}  # fmt: skip
_COHERE2 = {k: v for k, v in _LLAMA.items() if k not in ("head_dim", "rms_norm_eps")} | {
    "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "rope_theta": 1000.0,
    "sliding_window": 7, "num_hidden_layers": 4, "hidden_size": 60, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True, "logit_scale": 0.5,
}  # fmt: skip

_MINISTRAL3 = _LLAMA | {
    "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"],
    "rope_parameters": {
        "type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 10, "max_position_embeddings": 131, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
    },
}  # fmt: skip

_HUNYUAN = _LLAMA | {
    "model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"],
    "rope_theta": 100.0, "pad_token_id": 0,
}  # fmt: skip
_GRANITE4 = _GRANITE | {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_local_experts": 0, "shared_intermediate_size": 104, "intermediate_size": 20,
    "layer_types": ["attention"] * 3, "position_embedding_type": "rope", "mamba_n_heads": 4,
    "mamba_d_head": 30, "pad_token_id": 0,
}  # fmt: skip

_QWEN2_MOE = _QWEN3_MOE | {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_GLM4_MOE = _LLAMA | {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "rope_theta": 1000.0,
    "head_dim": 24, "hidden_size": 56, "n_routed_experts": 5, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
    "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
}  # fmt: skip
_QWEN3_NEXT = _QWEN3_MOE | {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 56,
    "num_hidden_layers": 3, "head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_QWEN3_5 = {
    k: v for k, v in _QWEN3_NEXT.items()
    if k not in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                 "shared_expert_intermediate_size")
} | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}  # fmt: skip
_QWEN3_5_MOE = {
    k: v for k, v in _QWEN3_NEXT.items() if k not in ("norm_topk_prob", "intermediate_size")
} | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
_LFM2 = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 60, "intermediate_size": 104, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 131,
    "norm_eps": 1e-5, "rope_theta": 1000.0, "block_multiple_of": 8,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}  # fmt: skip

_GEMMA4 = {k: v for k, v in _LLAMA.items() if k != "hidden_act"} | {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "hidden_size": 56,
    "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4, "tie_word_embeddings": True,
    "num_key_value_heads": 3, "head_dim": 16, "global_head_dim": 24, "sliding_window": 7,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip

_DEEPSEEK = {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 48,
    "rope_theta": 1000.0, "num_attention_heads": 6, "num_key_value_heads": 6,
    "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 28,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB,
        "n_positions": 131, "n_embd": 44, "n_inner": 104, "n_layer": 3, "n_head": 4,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
    "llama_mha": _LLAMA
    | {"hidden_size": 60, "num_key_value_heads": 6, "head_dim": 10, "rope_theta": 10000.0},
    "llama_gqa": _LLAMA | {"rope_theta": 500.0, "rope_scaling": None},
    "llama3_tied": _LLAMA
    | {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "llama_bias": _LLAMA | {"attention_bias": True, "mlp_bias": True, "rope_theta": 10000.0},
    "llama_linear": _LLAMA
    | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2": _QWEN2,
    "qwen2_window": _QWEN2
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": _QWEN3,
    "qwen3_window": _QWEN3
    | {
        "tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 7, "max_window_layers": 2,
    },
    "smollm3": _SMOLLM3,
    "smollm3_window": _SMOLLM3
    | {
        "no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 7,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "gpt_oss": _GPT_OSS,
    "gpt_oss_short": _GPT_OSS | {"num_hidden_layers": 2},
    "gpt_oss_mxfp4": _GPT_OSS
    | {"rope_scaling": _GPT_OSS["rope_scaling"] | {"truncate": True, "attention_factor": 1.25}},
    "mistral": _MISTRAL,
    "mistral_full": _MISTRAL
    | {
        "sliding_window": None, "head_dim": None, "hidden_size": 60, "num_key_value_heads": 3,
    },
    "seed_oss": _SEED_OSS,
    "seed_oss_bias": _SEED_OSS
    | {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_dense": _QWEN3_MOE
    | {
        "num_hidden_layers": 4, "norm_topk_prob": False, "decoder_sparse_step": 2,
        "mlp_only_layers": [1], "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 7,
    },
    "mixtral": _MIXTRAL,
    "mixtral_window": _MIXTRAL | {"sliding_window": 7, "tie_word_embeddings": True},
    "gemma3_text": _GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma3_text_nested": {k: v for k, v in _GEMMA3.items() if not k.startswith("rope_")}
    | {
        "layer_types": ["full_attention", "sliding_attention"] * 2, "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
        },
    },
    "granite": _GRANITE,
    "granite_bias": _GRANITE
    | {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 1.0},
    "olmo2": _OLMO2,
    "olmo3": _OLMO2
    | {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "sliding_window": 7,
        "num_hidden_layers": 4, "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
            "attention_factor": 1.2,
        },
    },
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next_dense": {k: v for k, v in _QWEN3_NEXT.items() if k != "layer_types"}
    | {
        "mlp_only_layers": [1], "full_attention_interval": 2, "norm_topk_prob": False,
        "attention_bias": True, "tie_word_embeddings": True, "linear_num_value_heads": 2,
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_text_plain": {k: v for k, v in _QWEN3_5.items() if k != "rope_theta"}
    | {
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 1], "mrope_interleaved": True,
        },
    },
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "lfm2": _LFM2,
    "lfm2_bias": {k: v for k, v in _LFM2.items() if k != "layer_types"}
    | {
        "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
        "tie_embedding": False, "full_attn_idxs": [0, 3],
    },
    "olmo2_bias": _OLMO2 | {"attention_bias": True, "num_key_value_heads": 3},
    "phi3": _PHI3 | {"sliding_window": 7},
    "phi3_long": _PHI3
    | {
        "partial_rotary_factor": 0.8, "rope_scaling": _LONGROPE, "tie_word_embeddings": True,
        "original_max_position_embeddings": 4, "num_key_value_heads": 3, "num_hidden_layers": 2,
    },
    "phi3_short": _PHI3
    | {
        "partial_rotary_factor": 0.8, "rope_scaling": _LONGROPE, "max_position_embeddings": 300,
        "original_max_position_embeddings": 131,
    },
    "glm4": _GLM4,
    "glm4_plain": _GLM4
    | {
        "partial_rotary_factor": 0.25, "attention_bias": False, "tie_word_embeddings": True,
        "num_key_value_heads": 3,
    },
    "ernie4_5": _ERNIE,
    "ernie4_5_bias": _ERNIE | {"use_bias": True, "tie_word_embeddings": False, "head_dim": 18},
    "exaone4": _EXAONE4,
    "exaone4_full": _EXAONE4
    | {
        "sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True,
        "num_key_value_heads": 3,
    },
    "cohere2": _COHERE2,
    "cohere2_bias": _COHERE2
    | {
        "attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_key_value_heads": 3,
    },
    "ministral3": _MINISTRAL3,
    "ministral3_tied": _MINISTRAL3 | {"tie_word_embeddings": True, "num_key_value_heads": 3},
    "hunyuan_v1_dense": _HUNYUAN
    | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32}},
    "hunyuan_bias": _HUNYUAN | {"attention_bias": True, "tie_word_embeddings": True},
    "granitemoehybrid": _GRANITE4,
    "granitemoehybrid_nope": _GRANITE4
    | {"position_embedding_type": None, "attention_bias": True, "attention_multiplier": 0.3},
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe_dense": _QWEN2_MOE
    | {
        "num_hidden_layers": 4, "norm_topk_prob": True, "decoder_sparse_step": 2,
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3, "qkv_bias": False,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_text_moe": _GEMMA4
    | {
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "num_hidden_layers": 3,
        "moe_intermediate_size": 32, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "num_global_key_value_heads": None, "attention_k_eq_v": False, "attention_bias": True,
        "tie_word_embeddings": False, "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_text_shared": _GEMMA4
    | {
        "num_hidden_layers": 7, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB,
        "num_key_value_heads": 1, "num_global_key_value_heads": None, "attention_k_eq_v": False,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
        + ["full_attention"], "rope_parameters": None,
    },
    "glm4_moe": _GLM4_MOE | {"tie_word_embeddings": True},
    "glm4_moe_plain": _GLM4_MOE
    | {
        "first_k_dense_replace": 0, "norm_topk_prob": False, "attention_bias": False,
        "use_qk_norm": False, "n_shared_experts": 1, "partial_rotary_factor": 0.25,
    },
    "deepseek_v2": _DEEPSEEK
    | {
        "rope_scaling": {
            "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.9,
        },
    },
    "deepseek_v2_groups": _DEEPSEEK
    | {
        "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "q_lora_rank": 28,
        "attention_bias": True, "n_shared_experts": 1, "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": _DEEPSEEK_V3
    | {
        "n_group": 3, "topk_group": 2, "attention_bias": True, "first_k_dense_replace": 0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v3_plain": _DEEPSEEK_V3
    | {
        "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "n_shared_experts": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip

NOT_COMPARED = ("gpt_oss_short",)
"""Variants that serve other tests, not the comparison with transformers."""
MAX_MODEL_LEN = {"phi3_short": 131}
"""Contexts that are shorter than config.json allows: here longrope has its short factors."""

FOUNDATION = ("gpt2", "llama", "qwen2", "qwen3", "smollm3", "gpt_oss")
"""Families whose every test is in the default run; of the others it has one of parity."""


def beyond_foundation(variants: Iterable[str]) -> list[str]:
    """Those of the variants (or families) that are of other families than FOUNDATION."""
    families = {v: VARIANTS.get(v, {"model_type": v})["model_type"] for v in variants}
    return [variant for variant, family in families.items() if family not in FOUNDATION]


def one_each(variants: Iterable[str]) -> list[Any]:
    """Parameters of a test of every family; its further variants are slow."""
    variants = list(variants)
    first = {VARIANTS[variant]["model_type"]: variant for variant in reversed(variants)}
    return cases(variants, default=list(first.values()))


def each(variants: Iterable[str]) -> list[Any]:
    """Parameters of a test; those beyond the foundation are slow."""
    variants = list(variants)
    return cases(variants, nightly=beyond_foundation(variants))


BEAM_VARIANTS = ("gpt2", "llama_gqa", "qwen2_window", "gpt_oss", "lfm2")
BEAM_TOKENS = 24
BEAM_SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 2, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 2, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 3, "length_penalty": 0.5, "early_stopping": False, "min_tokens": 8},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never", "repetition_penalty": 1.2},
    {"num_beams": 5, "length_penalty": 0.0, "early_stopping": False},
    {"num_beams": 5, "length_penalty": 0.5, "early_stopping": "never"},
    {"num_beams": 5, "length_penalty": 1.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": False, "repetition_penalty": 1.3},
    {"num_beams": 5, "length_penalty": -0.1, "early_stopping": "never", "num_ends": 0},
    {
        "num_beams": 3, "length_penalty": 1.0, "early_stopping": True, "num_ends": 1,
        "logit_bias": {7: 1.5, 30: -2.0}, "banned_token_ids": [11, 200],
    },
)  # fmt: skip
"""SamplingParams' names; `num_ends` of the ids that `ends` gives end the text, by default all."""

ROPE_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn_untruncated": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.707, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
ROPE_HEAD_DIM, ROPE_THETA = 64, 150_000.0


@dataclass(frozen=True)
class Reference:
    """A tiny checkpoint and what transformers says of it.

    Attributes:
        config: the object of config.json.
        shapes: the checkpoint's tensors by name.
        positions: of `tokens()` whose logits are here.
        logits: [rows, positions, vocab].
        greedy: per prompt of `prompts()` the tokens that generate gives.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    positions: tuple[int, ...]
    logits: np.ndarray
    greedy: np.ndarray


def tokens() -> np.ndarray:
    """[2, SEQ] token ids."""
    return np.random.RandomState(1).randint(0, VOCAB, (2, SEQ)).astype(np.int32)


def prompts() -> list[list[int]]:
    """Three prompts of unequal length, one on each side of a block and one longer."""
    state = np.random.RandomState(2)
    return [state.randint(0, VOCAB, n).tolist() for n in (5, 17, 33)]


LESS_ONE = ("gemma3", "qwen3_next", "qwen3_5")
"""Variants whose checkpoints have norms less one."""


SCALES = ("layer_scalar", "router.scale", "per_expert_scale")
"""Ends of names of weights that are around 1, as norms are."""


def is_packed(variant: str, name: str) -> bool:
    """Whether a tensor of the variant lies in the file as MXFP4."""
    return variant == "gpt_oss_mxfp4" and name.endswith(("gate_up_proj", "experts.down_proj"))


def values(variant: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's values, float32: the same on every machine (RandomState's stream is frozen)."""
    state = np.random.RandomState(zlib.crc32(name.encode()))
    if is_packed(variant, name):
        return unpack(*pack(state, shape))
    noise = state.standard_normal(shape).astype(np.float32)
    small = ("bias", "sinks", "embed_tokens.weight", "wte.weight", "lm_head.weight")
    if "norm" in name or ".ln_" in name or name.endswith(SCALES):
        less = name.endswith("bias") or variant.startswith(LESS_ONE)
        less &= "linear_attn" not in name
        array = (0.0 if less else 1.0) + 0.1 * noise
        if (
            variant.startswith("gemma") and "layernorm" in name and "post_" in name
        ):  # as large as the scaled embedding
            array = array + 4.0
        if variant.startswith("gemma4") and "q_norm" in name:  # in place of a scale of scores
            array = 0.5 * array
    elif name.endswith(small):
        array = 0.3 * noise
    elif "linear_attn" in name:  # large inputs of its norms, small outputs: a norm divides by
        # what is left where terms cancel, and grows their rounding
        sizes = {"conv1d.weight": 0.6, "out_proj.weight": 0.02}
        array = sizes.get(name.partition("linear_attn.")[2], 0.2) * noise
    else:  # large enough for varied text, small enough that rounding does not grow
        array = (0.35 if variant == "gpt2" else 0.2) * noise
    return array.astype(np.float32).astype(file_dtype(variant)).astype(np.float32)


def file_dtype(variant: str) -> Any:
    """How a variant's checkpoint stores its tensors."""
    return ml_dtypes.bfloat16 if variant.startswith("gpt_oss") else np.float32


def pack(state: np.random.RandomState, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random MXFP4 blocks and scales of a tensor [experts, in, out]."""
    experts, width, rows = shape
    blocks = state.randint(0, 256, (experts, rows, width // 32, 16)).astype(np.uint8)
    scales = state.randint(120, 124, (experts, rows, width // 32)).astype(np.uint8)
    return blocks, scales


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 number by number, written from the format's definition."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    experts, rows, groups, _ = blocks.shape
    out = np.zeros((experts, groups * 32, rows), np.float32)
    for index in np.ndindex(blocks.shape):
        expert, row, group, byte = index
        for half in range(2):
            nibble = (int(blocks[index]) >> (4 * half)) & 15
            value = magnitudes[nibble & 7] * (-1.0 if nibble & 8 else 1.0)
            scale = 2.0 ** (int(scales[expert, row, group]) - 127)
            out[expert, group * 32 + 2 * byte + half, row] = value * scale
    return out


def tensors(variant: str, reference: Reference) -> dict[str, np.ndarray]:
    """The checkpoint's tensors as the file holds them."""
    found: dict[str, np.ndarray] = {}
    kind = reference.config["model_type"]
    for name, shape in reference.shapes.items():
        if is_packed(variant, name):
            blocks, scales = pack(np.random.RandomState(zlib.crc32(name.encode())), shape)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif kind in EXPERT_NAMES and name.endswith("_proj"):
            fused = values(variant, name, shape).astype(file_dtype(variant))
            found |= experts_apart(name, fused, EXPERT_NAMES[kind])
        else:
            stored = name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
            found[stored] = values(variant, name, shape).astype(file_dtype(variant))
    return found


def stored_shapes(variant: str, reference: Reference) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors; of MXFP4 ones, of what they hold."""
    halves = ("_blocks", "_scales")
    found = {n: a.shape for n, a in tensors(variant, reference).items() if not n.endswith(halves)}
    return found | {n: s for n, s in reference.shapes.items() if is_packed(variant, n)}


EXPERT_NAMES = {
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "qwen2_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v2": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
}
"""Where checkpoints keep experts that transformers has fused in memory."""


def experts_apart(name: str, fused: np.ndarray, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors of [experts, out, in] as transformers has them."""
    folder, gate, up, down = names
    prefix = name.replace("mlp.experts", folder).rpartition(".")[0]
    parts = (gate, up) if name.endswith("gate_up_proj") else (down,)
    return {
        f"{prefix}.{expert}.{part}.weight": rows
        for expert, both in enumerate(fused)
        for part, rows in zip(parts, np.split(both, len(parts)), strict=True)
    }


def write_checkpoint(
    folder: Path,
    variant: str,
    reference: Reference,
    *,
    config: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], object] | None = None,
) -> Path:
    """A checkpoint folder with a tokenizer.

    Args:
        config: keys that replace the variant's own.
        change: edits the tensors in place before they are written.
    """
    from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    written = tensors(variant, reference)
    if change:
        change(written)
    raw = reference.config | dict(config or {})
    if variant == "gpt_oss_mxfp4":
        raw["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        }
    (folder / "config.json").write_text(json.dumps(raw))
    write_safetensors(
        folder / "model.safetensors",
        [
            TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda array=array: array)
            for name, array in written.items()
        ],
    )
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB ids: all bytes, six merges and one special token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("o", "n"), ("Ġ", "a")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def reference_model(variant: str) -> Any:
    """The transformers model of a variant, float32, with our values in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        torch.set_num_threads(1)  # these models are too small for more
        transformers.logging.set_verbosity_error()
        raw = copy.deepcopy(VARIANTS[variant])  # transformers edits what it is given
        config = transformers.AutoConfig.for_model(**raw)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for name, parameter in stored_values(model):
                parameter.copy_(torch.from_numpy(values(variant, name, tuple(parameter.shape))))
        return model.eval()


def stored_values(model: Any) -> list[tuple[str, Any]]:
    """What a checkpoint holds: parameters, the bias by which experts are chosen, and scales."""
    buffers = [
        pair
        for pair in model.named_buffers()
        if pair[0].endswith(("e_score_correction_bias", "layer_scalar"))
    ]
    return [*model.named_parameters(), *buffers]


def greedy(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """transformers' generate, greedy and without an end."""
    import torch

    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


Beams = list[tuple[tuple[int, ...], float]]
"""Texts with their scores, best first."""


def ends(greedy: list[int], setting: Mapping[str, Any]) -> list[int]:
    """Ids that end a beam's text under a setting: likely ones, so that beams end here and there."""
    return [greedy[4], greedy[9], greedy[13] // 2][: setting.get("num_ends", 3)]


def beams(model: Any, prompt: list[int], end_ids: list[int], setting: Mapping[str, Any]) -> Beams:
    """transformers' beam search: every beam and its score."""
    import torch

    ids, theirs = torch.tensor([prompt]), {k: v for k, v in setting.items() if k != "num_ends"}
    for ours, name in (("min_tokens", "min_new_tokens"), ("banned_token_ids", "suppress_tokens")):
        theirs |= {name: theirs.pop(ours)} if ours in theirs else {}
    if "logit_bias" in theirs:
        theirs["sequence_bias"] = {(i,): x for i, x in theirs.pop("logit_bias").items()}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=BEAM_TOKENS, do_sample=False,
        num_return_sequences=setting["num_beams"], eos_token_id=end_ids or None, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **theirs,
    )  # fmt: skip
    texts = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        text = row[len(prompt) :]
        length = next((i + 1 for i, token in enumerate(text) if token in end_ids), BEAM_TOKENS)
        texts.append((tuple(text[:length]), score))
    return texts


def live_beams(variant: str) -> list[list[Beams]]:
    """Per prompt of `prompts()` and setting of BEAM_SETTINGS, what transformers says now."""
    model = reference_model(variant)
    model.generation_config.eos_token_id = None
    texts = committed(variant).greedy.tolist()
    return [
        [beams(model, prompt, ends(text, setting), setting) for setting in BEAM_SETTINGS]
        for prompt, text in zip(prompts(), texts, strict=True)
    ]


def committed_beams(variant: str) -> list[list[Beams]]:
    """What transformers said of beams when the file was written."""
    found = json.loads((FOLDER / "beams.json").read_text())[variant]
    return [[[(tuple(t), s) for t, s in texts] for texts in row] for row in found]


def live(variant: str) -> Reference:
    """What transformers says now."""
    import torch

    model = reference_model(variant)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(torch.tensor(tokens()).long()).logits.numpy()
        generated = np.array([greedy(model, prompt) for prompt in prompts()], np.int32)
    shapes = {name: tuple(p.shape) for name, p in stored_values(model)}
    return Reference(VARIANTS[variant], shapes, tuple(range(SEQ)), logits, generated)


def committed(variant: str) -> Reference:
    """What transformers said when the files were written."""
    with np.load(FOLDER / f"{variant}.npz") as file:
        shapes = {name: tuple(shape) for name, shape in json.loads(str(file["shapes"])).items()}
        return Reference(VARIANTS[variant], shapes, KEPT_POSITIONS, file["logits"], file["greedy"])


def tensors_of(raw: dict[str, Any]) -> Reference:
    """What a checkpoint of any config.json is written from; it knows no logits."""
    from rooflax.models.registry import read_config

    _, config = read_config(raw)
    shapes = {
        hf: tuple(shape)
        for slot in config.slots()
        for hf, shape in zip(slot.hf_names, slot.line.hf_shapes(config.axis_sizes), strict=True)
    }
    return Reference(raw, shapes, (), np.zeros(0), np.zeros(0))


def rope_reference(setting: str) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cos and sin, from transformers."""
    import torch
    import transformers
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.logging.set_verbosity_error()
    rope = ROPE_SETTINGS[setting] | {"rope_theta": ROPE_THETA}
    config = LlamaConfig(
        hidden_size=2 * ROPE_HEAD_DIM, num_attention_heads=2, head_dim=ROPE_HEAD_DIM,
        rope_parameters=rope, max_position_embeddings=131_072,
    )  # fmt: skip
    if setting == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        function = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        frequencies, factor = function(config, torch.device("cpu"))
    return frequencies.numpy(), float(factor)


def main(variants: list[str]) -> None:
    """Writes the references of these variants, or of all and those of beams and RoPE too."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for variant in variants or VARIANTS:
        found = live(variant)
        np.savez_compressed(
            FOLDER / f"{variant}.npz",
            shapes=json.dumps(found.shapes),
            logits=found.logits[:, list(KEPT_POSITIONS)],
            greedy=found.greedy,
        )
    if variants:
        return
    texts = {variant: live_beams(variant) for variant in BEAM_VARIANTS}
    (FOLDER / "beams.json").write_text(json.dumps(texts, separators=(",", ":")) + "\n")
    rope = {}
    for setting in ROPE_SETTINGS:
        frequencies, factor = rope_reference(setting)
        rope |= {f"{setting}.frequencies": frequencies, f"{setting}.factor": factor}
    np.savez_compressed(FOLDER / "rope.npz", **rope)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"wrote {len(VARIANTS) + 2} files, {size / 1000:.0f} KB, to {FOLDER}")


if __name__ == "__main__":
    main(sys.argv[1:])
