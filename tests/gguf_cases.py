"""Tiny checkpoints whose GGUF files, made by llama.cpp's own converter, are in tests/data/gguf.

A checkpoint's values follow from its tensors' names (tests/goldens.py), so only its config and its
tokenizer are kept beside the GGUF files. tests/make_gguf_fixtures.py makes all of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests import goldens

FOLDER = Path(__file__).parent / "data" / "gguf"

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 131,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 275,
        "n_positions": 67, "n_ctx": 67, "n_embd": 32, "n_inner": 128, "n_layer": 2, "n_head": 4,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
    "llama3": _LLAMA
    | {
        "vocab_size": 281, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "tie_word_embeddings": True, "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama2": _LLAMA
    | {
        "vocab_size": 343, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False, "rope_theta": 10000.0, "attention_bias": True,
        "mlp_bias": True, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama_k": _LLAMA
    | {
        "vocab_size": 281, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 1,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "qwen2": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 287,
        "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 287,
        "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "max_position_embeddings": 131, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": True, "rope_theta": 1000.0,
    },
    "smollm3": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "vocab_size": 281,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "rope_theta": 1000.0, "pad_token_id": None,
    },
    "gpt_oss_mxfp4": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 283,
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7,
        "max_position_embeddings": 131, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": True, "rope_theta": 150.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 12,
        },
    },
}  # fmt: skip

FILES = {
    "gpt2": ("f32", "q8_0"),
    "llama3": ("f32", "q8_0", "q4_0"),
    "llama2": ("f32",),
    "llama_k": ("q4_k_m",),
    "qwen2": ("f32", "q4_0"),
    "qwen3": ("f32", "q8_0"),
    "smollm3": ("f32", "q4_0"),
    "gpt_oss_mxfp4": ("bf16",),
}
"""GGUF files by case."""


def gguf(name: str, kind: str) -> Path:
    """The GGUF file of a case."""
    return FOLDER / f"{name}.{kind}.gguf"


def write_original(folder: Path, name: str) -> Path:
    """The checkpoint folder of a case, with its weights, and its tokenizer if there is one yet."""
    from rooflax.models.registry import read_config

    _, config = read_config(CONFIGS[name])
    shapes = {
        hf: tuple(shape)
        for slot in config.slots()
        for hf, shape in zip(slot.hf_names, slot.weight.hf_shapes(config.axis_sizes), strict=True)
    }
    nothing = np.zeros(0)
    reference = goldens.Reference(CONFIGS[name], shapes, (), nothing, nothing)
    variant = name if name in ("gpt2", "gpt_oss_mxfp4") else "llama"
    goldens.write_checkpoint(folder, variant, reference)
    for path in (FOLDER / name).glob("*.json"):
        shutil.copy(path, folder / path.name)
    return folder
