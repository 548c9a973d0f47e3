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

from rooflax.models.registry import families, family, read_config
from tests.marks import cases

FOLDER = Path(__file__).parent / "data" / "goldens"
HAVE_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))

VOCAB = 263
NEW_TOKENS = 64
SEQ = 41
KEPT_POSITIONS = (0, 9, 25, 40)
"""Positions whose logits are committed; a live reference has them all."""


def _tiny(name: str) -> dict[str, Any]:
    raw = {"model_type": name} | family(name).TINY
    written = family(name).config_to_hf(read_config(raw)[1])
    return raw | {"architectures": written["architectures"]}


TINY = {name: _tiny(name) for name in families() if hasattr(family(name), "TINY")}
"""config.json of every decoder family's tiny checkpoint, which its file declares."""


def by_family(**others: str) -> dict[str, str]:
    """A variant of each family: its own, or another one."""
    return {"llama": "llama_gqa"} | {name: name for name in TINY if name != "llama"} | others


def of(family: str, *without: str, **changes: Any) -> dict[str, Any]:
    """A family's tiny checkpoint without some keys and with others."""
    return {k: v for k, v in TINY[family].items() if k not in without} | changes


LONGROPE = {
    "type": "longrope", "short_factor": [1.0, 1.25, 2.0, 4.0], "long_factor": [1.5, 3.0, 9.0, 33.0],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {v: TINY[name] for name, v in by_family().items()} | {
    "llama_mha": of(
        "llama", "rope_scaling", hidden_size=60, num_key_value_heads=6, head_dim=10,
        rope_theta=10000.0,
    ),
    "llama3_tied": of(
        "llama", "rope_theta", "rope_scaling", tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "llama_bias": of(
        "llama", "rope_scaling", attention_bias=True, mlp_bias=True, rope_theta=10000.0,
    ),
    "llama_linear": of("llama", rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    "qwen2_window": of("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3_window": of(
        "qwen3", tie_word_embeddings=True, attention_bias=True, use_sliding_window=True,
        sliding_window=7, max_window_layers=2,
    ),
    "smollm3_window": of(
        "smollm3", tie_word_embeddings=False, no_rope_layers=[0, 1, 1, 0], use_sliding_window=True,
        sliding_window=7, attention_bias=True, mlp_bias=True,
    ),
    "gpt_oss_short": of("gpt_oss", num_hidden_layers=2),
    "gpt_oss_mxfp4": of(
        "gpt_oss",
        rope_scaling=TINY["gpt_oss"]["rope_scaling"] | {"truncate": True, "attention_factor": 1.25},
    ),
    "mistral_full": of(
        "mistral", hidden_size=60, num_key_value_heads=3, head_dim=None, sliding_window=None,
    ),
    "seed_oss_bias": of(
        "seed_oss", tie_word_embeddings=True, attention_out_bias=True, mlp_bias=True,
    ),
    "qwen3_moe_dense": of(
        "qwen3_moe", num_hidden_layers=4, norm_topk_prob=False, decoder_sparse_step=2,
        mlp_only_layers=[1], attention_bias=True, use_sliding_window=True, sliding_window=7,
    ),
    "mixtral_window": of("mixtral", tie_word_embeddings=True, sliding_window=7),
    "gemma3_text_nested": of(
        "gemma3_text", "rope_theta", "rope_local_base_freq", "rope_scaling",
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention"] * 2,
        attention_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
        },
    ),
    "granite_bias": of("granite", attention_multiplier=1.0, attention_bias=True, mlp_bias=True),
    "qwen3_next_dense": of(
        "qwen3_next", "layer_types", tie_word_embeddings=True, norm_topk_prob=False,
        linear_num_value_heads=2, mlp_only_layers=[1], full_attention_interval=2,
        attention_bias=True,
    ),
    "qwen3_5_text_plain": of(
        "qwen3_5_text", "rope_theta", tie_word_embeddings=True, linear_num_key_heads=3,
        linear_num_value_heads=3,
        rope_parameters={
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 1], "mrope_interleaved": True,
        },
    ),
    "lfm2_bias": of(
        "lfm2", "layer_types", conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False,
        tie_embedding=False, full_attn_idxs=[0, 3],
    ),
    "olmo2_bias": of("olmo2", num_key_value_heads=3, attention_bias=True),
    "phi3_long": of(
        "phi3", "sliding_window", num_hidden_layers=2, num_key_value_heads=3,
        tie_word_embeddings=True, partial_rotary_factor=0.8,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=4,
    ),
    "phi3_short": of(
        "phi3", "sliding_window", max_position_embeddings=300, partial_rotary_factor=0.8,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=131,
    ),
    "glm4_plain": of(
        "glm4", num_key_value_heads=3, tie_word_embeddings=True, attention_bias=False,
        partial_rotary_factor=0.25,
    ),
    "ernie4_5_bias": of("ernie4_5", head_dim=18, tie_word_embeddings=False, use_bias=True),
    "exaone4_full": of(
        "exaone4", num_key_value_heads=3, tie_word_embeddings=True, sliding_window=None,
        layer_types=["full_attention"] * 4,
    ),
    "cohere2_bias": of(
        "cohere2", num_key_value_heads=3, tie_word_embeddings=False, logit_scale=0.3,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "ministral3_tied": of("ministral3", num_key_value_heads=3, tie_word_embeddings=True),
    "hunyuan_bias": of(
        "hunyuan_v1_dense", "rope_scaling", tie_word_embeddings=True, attention_bias=True,
    ),
    "granitemoehybrid_nope": of(
        "granitemoehybrid", attention_multiplier=0.3, position_embedding_type=None,
        attention_bias=True,
    ),
    "qwen2_moe_dense": of(
        "qwen2_moe", num_hidden_layers=4, norm_topk_prob=True, decoder_sparse_step=2,
        use_sliding_window=True, sliding_window=7, max_window_layers=3, qkv_bias=False,
    ),
    "gemma4_text_moe": of(
        "gemma4_text", num_hidden_layers=3, tie_word_embeddings=False,
        num_global_key_value_heads=None, attention_k_eq_v=False, hidden_size_per_layer_input=12,
        final_logit_softcapping=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        enable_moe_block=True, num_experts=5, top_k_experts=3, moe_intermediate_size=32,
        attention_bias=True, vocab_size_per_layer_input=VOCAB,
    ),
    "gemma4_text_shared": of(
        "gemma4_text", num_hidden_layers=7, num_key_value_heads=1, num_global_key_value_heads=None,
        attention_k_eq_v=False, hidden_size_per_layer_input=12,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2
        + ["full_attention"],
        rope_parameters=None, num_kv_shared_layers=4, use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB,
    ),
    "glm4_moe_plain": of(
        "glm4_moe", tie_word_embeddings=False, n_shared_experts=1, attention_bias=False,
        use_qk_norm=False, first_k_dense_replace=0, norm_topk_prob=False,
        partial_rotary_factor=0.25,
    ),
    "deepseek_v2_groups": of(
        "deepseek_v2", "rope_scaling", tie_word_embeddings=True, q_lora_rank=28,
        n_shared_experts=1, first_k_dense_replace=0, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, attention_bias=True,
    ),
    "deepseek_v3_plain": of(
        "deepseek_v3", "attention_bias", "rope_scaling", tie_word_embeddings=True,
        q_lora_rank=None, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.0,
        n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False,
    ),
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


LESS_ONE = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
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
            stored = name.replace(*STORED_NAMES.get(kind, ("", "")))
            found[stored] = values(variant, name, shape).astype(file_dtype(variant))
    return found


def stored_shapes(variant: str, reference: Reference) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors; of MXFP4 ones, of what they hold."""
    halves = ("_blocks", "_scales")
    found = {n: a.shape for n, a in tensors(variant, reference).items() if not n.endswith(halves)}
    return found | {n: s for n, s in reference.shapes.items() if is_packed(variant, n)}


STORED_NAMES = {"mixtral": (".mlp.", ".block_sparse_moe."), "gpt_neox": ("lm_head.", "embed_out.")}
"""Parts of names in memory, and what checkpoints have in their place."""
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
    _, config = read_config(raw)
    shapes = {
        hf: tuple(shape)
        for slot in config.params()
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
