"""Tiny checkpoints whose GGUF files, made by llama.cpp's own converter, are in tests/data/gguf.

A checkpoint's values follow from its tensors' names (tests/goldens.py), so only its config and its
tokenizer are kept beside the GGUF files. tests/make_gguf_fixtures.py makes all of it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.models.registry import gguf_families
from tests import goldens, pooling_cases, tokenizer_cases

FOLDER = Path(__file__).parent / "data" / "gguf"

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 131,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip

_OF = goldens.VARIANTS
_ROWS = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _OF["gpt2"] | {
        "vocab_size": 275, "n_positions": 67, "n_ctx": 67, "n_embd": 32, "n_inner": 128,
        "n_layer": 2,
    },
    "llama3": _LLAMA | {
        "vocab_size": 281, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "tie_word_embeddings": True, "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama2": _LLAMA | {
        "vocab_size": 343, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
        "num_hidden_layers": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
        "attention_bias": True, "mlp_bias": True, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama_k": _LLAMA | {
        "vocab_size": 281, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 1,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    },
    "qwen2": _OF["qwen2"] | _ROWS | {
        "vocab_size": 287, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen3": _OF["qwen3"] | _ROWS | {
        "vocab_size": 287, "num_hidden_layers": 2, "head_dim": 24, "tie_word_embeddings": True,
    },
    "smollm3": {
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "vocab_size": 281,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "rope_theta": 1000.0, "pad_token_id": None,
    },
    "gpt_oss_mxfp4": _OF["gpt_oss_short"] | {
        "vocab_size": 283, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2,
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
    variant = name if name in ("gpt2", "gpt_oss_mxfp4") else "llama"
    goldens.write_checkpoint(folder, variant, goldens.tensors_of(CONFIGS[name]))
    for path in (FOLDER / name).glob("*.json"):
        shutil.copy(path, folder / path.name)
    return folder


_GEMMA4 = {
    "global_head_dim": 64, "num_kv_shared_layers": 0, "moe_intermediate_size": None,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
"""What llama.cpp's converter wants said."""
_SIZES = {
    "vocab_size": tokenizer_cases.ROWS, "hidden_size": 96, "intermediate_size": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "head_dim": 32,
    "shared_intermediate_size": 128, "n_embd": 64, "n_inner": 256, "n_ctx": 131,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": tokenizer_cases.ROWS, "v_head_dim": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
}  # fmt: skip
"""Of matrices that divide into blocks of 32."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_ctx": 131}),
    "llama": ("llama3_tied", {}),
    "llama_bias": ("llama_bias", {}),
    "llama_linear": ("llama_linear", {}),
    "mistral": ("mistral_full", {"head_dim": 32, "num_key_value_heads": 2}),
    "mixtral": ("mixtral", {"intermediate_size": 64}),
    "qwen2": (
        "qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2_moe": ("qwen2_moe", {"head_dim": 16}),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 64}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gemma3": ("gemma3_text", {"sliding_window_pattern": 6, "query_pre_attn_scalar": 32}),
    "gemma4": ("gemma4_text", _GEMMA4 | {"hidden_size_per_layer_input": 0}),
    "gemma4_moe": (
        "gemma4_text_moe", _GEMMA4 | {"moe_intermediate_size": 64, "attention_bias": False},
    ),
    "gemma4_shared": ("gemma4_text_shared", _GEMMA4 | {"num_kv_shared_layers": 4}),
    "granite4": ("granitemoehybrid", {"intermediate_size": 128}),
    "granite4_nope": (
        "granitemoehybrid", {"position_embedding_type": None, "intermediate_size": 128},
    ),
    "phi3": ("phi3", {}),
    "phi3_long": (
        "phi3_long",
        {
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0, 1.25, 2.0, 4.0],
                "long_factor": [1.5, 3.0, 9.0, 33.0],
            },
        },
    ),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4_full", {"head_dim": 16}),
    "cohere2": ("cohere2", {"rotary_pct": 1.0}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False, "block_ff_dim": 128}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "rope_scaling": goldens.VARIANTS["deepseek_v2"]["rope_scaling"] | {"mscale": 0.9},
            "rms_norm_eps": 1e-6,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "q_lora_rank": 32, "attention_bias": False, "rms_norm_eps": 1e-6,
            "scoring_func": "sigmoid",
        },
    ),
}  # fmt: skip
"""A variant of goldens and what differs, for a checkpoint of each family that files are made of."""
_HERE = {goldens.VARIANTS[variant]["model_type"] for variant, _ in FAMILIES.values()}
FAMILIES |= {
    name: (name, {})
    for name, spec in gguf_families().items() if spec.is_written and name not in _HERE
}  # fmt: skip


GEMMA4 = ("gemma4", "gemma4_moe", "gemma4_shared")
_TINY = {"hidden_size": 10}
_PHI3 = {"num_attention_heads": 2, "num_key_value_heads": 1}
_FACTORS = {"type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [1.5, 3.0]}
KEPT_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": _TINY,
    "mixtral": _TINY | {"num_local_experts": 3},
    "qwen3_moe": _TINY,
    "qwen2_moe": _TINY,
    "seed_oss": _TINY,
    "gemma3": {
        "hidden_size": 12, "query_pre_attn_scalar": 8, "vocab_size": tokenizer_cases.VOCAB,
    },
    "granite": {},
    "granite4": {
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_n_heads": 4, "mamba_d_head": 8, "shared_intermediate_size": 24,
    },
    "olmo2": {},
    "phi3": _PHI3,
    "phi3_long": _PHI3 | {"rope_scaling": _FACTORS, "max_position_embeddings": 256},
    "glm4": _TINY,
    "glm4_moe": _TINY | {"n_routed_experts": 3},
    "ernie4_5": _TINY,
    "exaone4": _TINY,
    "cohere2": {},
    "ministral3": _TINY,
    "hunyuan": _TINY
    | {"rope_theta": 10_000.0, "max_position_embeddings": 262_144, "head_dim": 4},
}  # fmt: skip
"""What else the checkpoints of some kept files say; a factor or theta that follows from it is a
number of float32, because a file has no other."""
READ_AS = {"mistral": "llama", "granite4": "granite"}
"""Families that the converter's files do not name, and the one of equal layers that they do."""
KEPT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "olmo3", "deepseek_v2", "deepseek_v3", *GEMMA4,
    *KEPT_CHANGES,
)  # fmt: skip
"""Families of which a file by llama.cpp's converter is kept, of bfloat16 matrices; not Granite 4
without RoPE, of which the converter writes another model."""
TOKENIZERS = dict.fromkeys(GEMMA4, "gemma4")
"""Those that a family's files have, where the converter reads no other."""


EMBEDS = "embedding_gemma"
"""The kept file of a model that attends both ways, with layers behind its pooling."""


def write_embedding_gemma(folder: Path) -> Path:
    """The checkpoint that it was made from."""
    sizes = kept_sizes("gemma3") | {
        "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True,
        "vocab_size": tokenizer_cases.VOCAB, "hidden_size": 16,
        "num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 8,
        "rope_scaling": None, "rope_local_base_freq": 10_000.0,
    }  # fmt: skip
    write_family(folder, "gemma3", **sizes)
    widths = {"2_Dense": (16, 20), "3_Dense": (20, 16)}
    layers = (pooling_cases.dense(*each) for each in widths.values())
    modules = pooling_cases.pooling("mean_tokens", 16), *layers, pooling_cases.NORMALIZE
    pooling_cases.write_modules(folder, *modules)
    for path, (inner, outer) in widths.items():
        weight = np.random.RandomState(inner).randn(outer, inner)
        pooling_cases.write_dense(folder / path, weight)
    return folder


def write_kept(folder: Path, name: str) -> Path:
    """The checkpoint that a kept file was made from."""
    if name == EMBEDS:
        return write_embedding_gemma(folder)
    return write_family(folder, name, TOKENIZERS.get(name, "gpt-2"), **kept_sizes(name))


def kept(name: str) -> Path:
    """The kept file of a family."""
    return FOLDER / f"{name}.bf16.gguf"


def kept_sizes(name: str) -> dict[str, Any]:
    """What is smaller in the checkpoint that a kept file was made from."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20, "block_ff_dim": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6,
        "linear_value_head_dim": 6, "head_dim": 8, "global_head_dim": 16, "top_k_experts": 2,
        "hidden_size_per_layer_input": 6, "num_global_key_value_heads": 1, "kv_lora_rank": 12,
        "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6,
    }  # fmt: skip
    raw = family_config(name)
    sizes |= {"num_key_value_heads": 4} if "kv_lora_rank" in raw else {}
    small = {key: size for key, size in sizes.items() if raw.get(key)}
    return small | converted_rows(name) | KEPT_CHANGES.get(name, {})


def converted_rows(name: str) -> dict[str, int]:
    """Rows of embeddings where the converter wants a token for each."""
    if name not in TOKENIZERS:
        return {}
    rows = tokenizer_cases.sentencepiece(TOKENIZERS[name]).get_vocab_size()
    return {"vocab_size": rows, "vocab_size_per_layer_input": rows}


def family_config(name: str) -> dict[str, Any]:
    """config.json of a family's checkpoint."""
    variant, changes = FAMILIES[name]
    raw = goldens.VARIANTS[variant]
    return raw | {key: size for key, size in _SIZES.items() if key in raw} | changes


def write_family(folder: Path, name: str, tokenizer: str = "gpt-2", **changes: Any) -> Path:
    """A family's checkpoint with a tokenizer of `tokenizer_cases`."""
    reference = goldens.tensors_of(family_config(name) | changes)
    goldens.write_checkpoint(folder, FAMILIES[name][0], reference)
    tokenizer_cases.write(folder, tokenizer)
    return folder


HALVES = {
    "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16s of a block lie, by the types that have a format of their own on CPU."""


def random_blocks(
    kind: str, rows: int, inner: int, halves: Any = None, seed: int = 0
) -> np.ndarray:
    """Blocks [rows, blocks, bytes] of random codes; no float16 of theirs is infinite or NaN.

    Args:
        kind: one of `HALVES`.
        inner: at least so many inputs in a row; blocks are whole.
        halves: float16s to draw from in place of normally distributed ones.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng((seed, list(HALVES).index(kind)))
    blocks = rng.integers(0, 256, (rows, -(-inner // values), nbytes)).astype(np.uint8)
    for begin in HALVES[kind]:
        size = blocks.shape[:2]
        numbers = rng.normal(size=size) if halves is None else rng.choice(halves, size)
        blocks[..., begin : begin + 2] = numbers.astype("<f2")[..., None].view(np.uint8)
    return blocks


def _attention(qkv: str, v: str, o: str) -> dict[str, str]:
    return {"attn_q": qkv, "attn_k": qkv, "attn_v": v, "attn_output": o}


def _mlp(gate_up: str, down: str) -> dict[str, str]:
    return {"ffn_gate": gate_up, "ffn_up": gate_up, "ffn_down": down}


MIXED_LAYERS = (
    _attention("Q4_K", "Q4_K", "Q5_0") | _mlp("Q5_K", "Q4_1"),
    _attention("Q4_K", "Q4_K", "Q5_1") | _mlp("Q5_K", "IQ4_NL"),
    _attention("Q4_K", "Q6_K", "Q5_0") | _mlp("Q3_K", "Q8_0") | {"ffn_up": "Q5_1"},
    _attention("IQ4_XS", "IQ4_XS", "Q5_0") | _mlp("Q2_K", "Q4_0"),
)
"""Types of a file's tensors by layer: every one, layers that differ, and fused weights that do."""
MIXED_WIDTH = 128
"""Of its MLPs."""


def write_mixed(
    path: Path, layers: tuple[dict[str, str], ...] = MIXED_LAYERS, embed: str = "Q6_K"
) -> Path:
    """A file of `llama_k`'s model with these layers, of random blocks."""
    from gguf import GGMLQuantizationType, GGUFReader

    source = GGUFReader(gguf("llama_k", "q4_k_m"))
    sizes = {"llama.block_count": len(layers), "llama.feed_forward_length": MIXED_WIDTH}
    writer = _with_metadata(path, source, sizes)
    shapes = {t.name: [int(n) for n in t.shape[::-1]] for t in source.tensors}
    shapes |= {f"blk.0.ffn_{part}.weight": [MIXED_WIDTH, 256] for part in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = [256, MIXED_WIDTH]
    kinds = {"token_embd.weight": embed}
    for number, layer in enumerate(layers):
        kinds |= {f"blk.{number}.{name}.weight": kind for name, kind in layer.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{norm}.weight", np.ones(256, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    for seed, (name, kind) in enumerate(kinds.items()):
        rows, inner = shapes[re.sub(r"blk\.\d+", "blk.0", name)]
        blocks = weight_blocks(kind, rows, inner, seed).reshape(rows, -1)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
    return _written(writer, path)


def requantized(path: Path, source: Path, kinds: dict[str, str]) -> Path:
    """A file of numbers with these tensors as blocks, of types that gguf-py makes."""
    from gguf import GGMLQuantizationType, GGUFReader, quants

    reader = GGUFReader(source)
    writer = _with_metadata(path, reader, {})
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name in kinds:
            kind = GGMLQuantizationType[kinds[tensor.name]]
            data = quants.quantize(quants.dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    return _written(writer, path)


def _with_metadata(path: Path, source: Any, changes: dict[str, Any]) -> Any:
    """A writer with a reader's metadata."""
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[1] if len(field.types) > 1 else None
        value = changes.get(field.name, field.contents())
        writer.add_key_value(field.name, value, GGUFValueType(kind), inner)
    return writer


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weight_blocks(kind: str, rows: int, inner: int, seed: int) -> np.ndarray:
    """Blocks whose numbers are those of a weight: normally distributed, or of about that size."""
    from gguf import GGMLQuantizationType, quants

    type_of = GGMLQuantizationType[kind]
    if kind in ("Q8_0", "Q4_0"):
        numbers = np.random.default_rng(seed).normal(0, 0.06, (rows, inner)).astype(np.float32)
        return quants.quantize(numbers, type_of)
    found = random_blocks(kind, rows, inner, np.array([1.0]), seed).reshape(rows, -1)
    size = 0.06 / quants.dequantize(found, type_of).std()
    return random_blocks(kind, rows, inner, np.array([size, -size, size / 2]), seed)
