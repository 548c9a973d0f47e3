"""From a GGUF file's metadata to the config.json that it stands for, and to generation defaults.

The metadata is a closed world as config.json is: a key of the architecture that nobody reads is an
error that names it. What comes out goes through the families' own config readers, which know what
can be computed. llama3's RoPE scaling, which such files keep as a tensor of divisors, is recovered
as the numbers that it was made from.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, RooflaxError, UnsupportedModelError
from rooflax.fields.sampling import SAMPLING
from rooflax.loading.generation_config import GenerationDefaults, generation_defaults
from rooflax.loading.gguf import Header
from rooflax.loading.pooling import GGUF_DENSE, GGUF_POOLING
from rooflax.models.common import MOST_LAYERS, layer_types
from rooflax.models.registry import PAGE, check_waived, nearest, read_config
from rooflax.nn.rope import LEAST, MOST, inverse_frequencies

FAMILIES = {
    "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3",
    "gpt-oss": "gpt_oss", "seed_oss": "seed_oss",
    "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "granite": "granite", "olmo2": "olmo2",
    "phi3": "phi3", "glm4": "glm4", "ernie4_5": "ernie4_5",
    "hunyuan-dense": "hunyuan_v1_dense", "exaone4": "exaone4", "cohere2": "cohere2",
    "mistral3": "ministral3", "qwen2moe": "qwen2_moe", "glm4moe": "glm4_moe", "lfm2": "lfm2",
    "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text", "deepseek2": "deepseek_v2",
}  # fmt: skip
"""A file's architecture to our family."""
BOTH_WAYS = {"gemma-embedding": "gemma3_text"}
"""Those of models whose tokens attend both ways."""
ALIASES = {
    "mixtral": "llama", "mistral": "llama", "olmo3": "olmo2", "granitemoehybrid": "granite",
    "deepseek_v3": "deepseek2",
}  # fmt: skip
"""Families whose files have another's architecture."""

REQUIRED = ("context_length", "_epsilon")
"""Ends of keys without which llama.cpp opens no file (llama-model.cpp, src/models/)."""
REQUIRED_OF = {
    "cohere2": ("logit_scale", "attention.sliding_window"), "granite": ("logit_scale",),
    "gemma4_text": ("attention.sliding_window",), "gpt_oss": ("attention.sliding_window",),
}  # fmt: skip
"""The same by family."""
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight",
}  # fmt: skip
TOLD_BY: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "llama": ("mixtral", "expert_count", bool),
    "ministral3": ("mistral", "attention.temperature_scale", operator.not_),
    "olmo2": ("olmo3", "attention.sliding_window", bool),
    "granite": ("granitemoehybrid", "rope.scaling.finetuned", lambda value: value is False),
    "deepseek_v2": ("deepseek_v3", "expert_gating_func", lambda value: value == 2),  # sigmoids
}
"""Families whose architecture another's files have, too; the other, and the key that tells it."""
_BOTH = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
BIAS_KEYS: dict[str, dict[str, str]] = {
    "gpt2": {}, "qwen2": {}, "mixtral": {}, "gemma3_text": {}, "phi3": {}, "exaone4": {},
    "ministral3": {}, "mistral": {}, "lfm2": {}, "gemma4_text": {}, "llama": _BOTH,
    "smollm3": _BOTH, "granite": _BOTH, "seed_oss": _BOTH | {"attention_out_bias": "attn_output"},
    "qwen2_moe": {"qkv_bias": "attn_q"}, "ernie4_5": {"use_bias": "attn_q"},
}  # fmt: skip
"""Keys that say whether there are biases, and of which tensor; of others, attention's alone."""
HEADS_PER_KIND = ("gemma4_text",)
"""Families whose layers with a window have other heads than those without."""
QUERY_SCALE = ("gemma3_text",)
ALL_ATTENTION = ("granitemoehybrid",)
"""Families that may have Mamba layers, which their files here have not."""
NOT_MODELS = {
    "adapter": "an adapter (LoRA), which rooflax does not read; merge it into its base model",
    "mmproj": "the image or audio part of a model (mmproj); name the model's own file",
    "imatrix": "an importance matrix and no model",
    "vocab": "a vocabulary without weights",
}
"""Values of `general.type`, and what such a file is."""
WAIVED: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("granite", "granitemoehybrid"), ("ssm.*", "expert_shared_feed_forward_length")
)
"""Metadata that changes nothing, of layers that are not there."""
WITHOUT_ROPE = ("gpt2",)
UNTRUNCATED = ("gpt_oss",)
"""Families whose every checkpoint says so; the metadata cannot."""
SCALED_THETA = ("hunyuan_v1_dense",)
"""Families whose scaling of RoPE is in theta."""
SCALES_QUERIES = ("ministral3",)
GROUP_METHODS = {"deepseek_v2": "group_limited_greedy"}
"""Of families that name how groups of experts are chosen, which the metadata cannot."""
PARTIAL = ("phi3", "glm4", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that may rotate a part of a head's dimensions."""
MAX_FACTOR_ERROR = 1e-5
STILL = 1e30
"""Divisor of a frequency that is 0."""

END_TEXTS = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|return|>",
    "<|call|>", "<end_of_turn>", "<|end|>", "<eos>", "</s>", "[EOS]", "[EOT]", "<EOT>",
    "<turn|>", "<|tool_response>",
)  # fmt: skip
"""Control tokens that end an answer, as llama.cpp has them; a file names three of them at most."""
ENDS_A_MESSAGE = "<|end|>"
"""In GPT-OSS's vocabulary, which has <|return|> for an answer."""

_COMMON = {
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
_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN3_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_QWEN2_MOE = _QWEN3_MOE | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GLM4_MOE = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_GPT_OSS = _EXPERTS | {
    "expert_feed_forward_length": "intermediate_size",
    "attention.sliding_window": "sliding_window",
}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_COHERE2 = {
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "logit_scale": "logit_scale",
}
_GEMMA3 = {
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_PHI3 = {
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
KEYS = {
    "gpt2": _GPT2, "llama": _COMMON, "qwen2": _COMMON, "qwen3": _COMMON, "smollm3": _COMMON,
    "gpt_oss": _COMMON | _GPT_OSS, "seed_oss": _COMMON,
    "qwen3_moe": _COMMON | _QWEN3_MOE, "mixtral": _COMMON | _EXPERTS,
    "gemma3_text": _COMMON | _GEMMA3, "granite": _COMMON | _GRANITE,
    "olmo2": _COMMON, "phi3": _COMMON | _PHI3, "glm4": _COMMON,
    "qwen2_moe": _COMMON | _QWEN2_MOE, "glm4_moe": _COMMON | _GLM4_MOE,
    "hunyuan_v1_dense": _COMMON, "ministral3": _COMMON, "mistral": _COMMON,
    "ernie4_5": _COMMON, "cohere2": _COMMON | _COHERE2,
    "exaone4": _COMMON | {"attention.sliding_window": "sliding_window"},
}  # fmt: skip
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
KEYS |= {
    "lfm2": _COMMON | _LFM2, "olmo3": _COMMON | {"attention.sliding_window": "sliding_window"},
    "granitemoehybrid": _COMMON | _GRANITE | {"feed_forward_length": "shared_intermediate_size"},
    "qwen3_next": _COMMON | _QWEN2_MOE | _DELTA, "qwen3_5_text": _COMMON | _DELTA,
    "qwen3_5_moe_text": {k: v for k, v in _COMMON.items() if k != "feed_forward_length"}
    | _QWEN2_MOE | _DELTA,
}  # fmt: skip
_GEMMA4 = {
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_ONE_HEAD = ("attention.head_count_kv", "attention.key_length")
"""Keys that are of the latent itself in files of latent attention."""
KEYS |= dict.fromkeys(
    ("deepseek_v2", "deepseek_v3"),
    {k: v for k, v in _COMMON.items() if k not in _ONE_HEAD} | _GLM4_MOE | _LATENT,
)
KEYS["gemma4_text"] = {k: v for k, v in _COMMON.items() if k != "rope.freq_base"} | _GEMMA4
_AS_COMPUTED = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {"num_local_experts": 0, "position_embedding_type": None},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {"norm_topk_prob": True},
}
"""What files cannot say, and llama.cpp computes."""
_NO_GROUPS = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_IF_ABSENT: dict[str, dict[str, Any]] = {"exaone4": {"sliding_window": None}} | dict.fromkeys(
    ("deepseek_v2", "deepseek_v3"), _NO_GROUPS
)
NO_WINDOW = ("gemma3_text",)
"""Families of which no layer has a window where the file has no size of one."""
EXAONE4_WINDOWED = 64
"""Layers of the EXAONE 4 that has windows, by which llama.cpp knows it."""
_IF_ABSENT_OF = {("exaone4", EXAONE4_WINDOWED): {"sliding_window": 4096}}
"""By family and number of layers."""
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}

SAMPLING_KEYS = {one.gguf: name for name, one in SAMPLING.items() if one.gguf}


def read_gguf_config(
    file: Header, *, ignore: Sequence[str] = ()
) -> tuple[str, Any, dict[str, Any]]:
    """The family's name, its config, and the config.json that the metadata stands for.

    Args:
        ignore: further keys (or patterns) to pass over.

    Raises:
        UnsupportedModelError: an architecture or value that we do not compute, a key nobody reads.
        CheckpointError: a key is missing or has an impossible value.
    """
    reader = _Metadata(file)
    raw = reader.config()
    reader.finish(ignore)
    try:
        name, config = read_config(raw)
    except RooflaxError as error:
        reason = str(error).replace("config.json", "the config.json that its metadata stands for")
        raise type(error)(f"{file.path}: {reason}") from None
    reader.check_required()
    return name, config, raw


class _Metadata:
    """The keys of one architecture, read one by one."""

    def __init__(self, file: Header):
        self.file = file
        architecture = file.metadata.get("general.architecture")
        kind = file.metadata.get("general.type")
        if isinstance(kind, str) and kind in NOT_MODELS:
            raise UnsupportedModelError(f"{file.path} is {NOT_MODELS[kind]}.")
        known = FAMILIES | BOTH_WAYS
        if not isinstance(architecture, str) or architecture not in known:
            raise UnsupportedModelError(
                f"{file.path} holds the architecture {architecture!r:.60}, which is not one of "
                f"the {len(known)} that rooflax computes{nearest(architecture, known)}. What is "
                f"computed: {PAGE}."
            )
        self.family, self._prefix = known[architecture], f"{architecture}."
        self._both_ways = architecture in BOTH_WAYS
        self._read: set[str] = set()
        if self.family in TOLD_BY:
            other, key, is_other = TOLD_BY[self.family]
            self.family = other if is_other(self.get(key)) else self.family

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self._prefix + key)
        value = self.file.metadata.get(self._prefix + key, default)
        if isinstance(value, list | np.ndarray):
            raise UnsupportedModelError(
                f"{self.file.path} gives {self._prefix + key} layer by layer, which rooflax does "
                f"not compute."
            )
        return value

    def per_layer(self, key: str) -> list[Any] | None:
        """A value of each layer; None where the file has none, or one for all."""
        value = self.file.metadata.get(self._prefix + key)
        if not isinstance(value, list | np.ndarray):
            return None
        self._read.add(self._prefix + key)
        return value if isinstance(value, list) else value.tolist()

    def expect(self, key: str, *wanted: Any) -> None:
        """The key is absent or has one of these values."""
        value = self.get(key)
        if value is not None and value not in wanted:
            raise UnsupportedModelError(
                f"{self.file.path} has {self._prefix + key} = {value!r:.80}, which rooflax does "
                f"not compute (only {' or '.join(f'{x!r:.80}' for x in wanted)})."
            )

    def config(self) -> dict[str, Any]:
        self._check_count("block_count", 1)
        self._check_count("nextn_predict_layers", 0)
        has_kinds = self.family in HEADS_PER_KIND
        per_layer = self._kinds() if has_kinds else self._heads_per_layer()
        keys = ((key, hf) for key, hf in KEYS[self.family].items() if hf not in per_layer)
        found = {hf: self.get(key) for key, hf in keys} | per_layer
        raw = {key: value for key, value in found.items() if value is not None}
        names = set(self.file.names())
        raw["model_type"] = self.family
        raw["tie_word_embeddings"] = "output.weight" not in names
        if "token_embd.weight" in names:
            raw.setdefault("vocab_size", self.file.info("token_embd.weight").shape[0])
        biased = {name.split(".")[2] for name in names if re.fullmatch(r"blk\.\d+\..*\.bias", name)}
        biases = BIAS_KEYS.get(self.family, {"attention_bias": "attn_q"})
        raw |= {key: part in biased for key, part in biases.items()}
        raw |= _AS_COMPUTED.get(self.family, {})
        of_size = _IF_ABSENT_OF.get((self.family, raw.get("num_hidden_layers")), {})
        raw = _IF_ABSENT.get(self.family, {}) | of_size | raw
        if self.family in ALL_ATTENTION:
            raw["layer_types"] = ["attention"] * raw.get("num_hidden_layers", 0)
        if self._both_ways:
            raw |= {"use_bidirectional_attention": True}
            self._check_dense(names)
        self._waive(*WAIVED.get(self.family, ()))
        if "ssm.state_size" in KEYS[self.family]:
            raw |= self._delta(raw)
        if "leading_dense_block_count" in KEYS[self.family]:
            raw |= self._dense_first(raw, names)
        if "attention.sliding_window" in KEYS[self.family]:
            raw |= self._window_layers()
        if self.family in QUERY_SCALE:
            raw |= _query_scale(raw)
        if self.family in NO_WINDOW and not raw.get("sliding_window") and not self._both_ways:
            raw["layer_types"] = ["full_attention"] * raw.get("num_hidden_layers", 0)
        if has_kinds:
            raw |= self._kinds_whole(raw)
        elif is_latent(self.family):
            raw |= self._latent(raw)
        elif self.family not in WITHOUT_ROPE:
            raw |= self._attention_and_rope(raw)
        if any(self.file.info(n).dtype == "BF16" for n in names):
            raw["torch_dtype"] = "bfloat16"
        return raw | _end_tokens(self.file)

    def _check_count(self, key: str, least: int) -> None:
        """Lists are made of so many layers."""
        count = self.file.metadata.get(self._prefix + key)
        is_list = isinstance(count, list | np.ndarray)  # which `get` rejects
        whole = type(count) is int and least <= count <= MOST_LAYERS
        if not (count is None or is_list or whole):
            raise CheckpointError(
                f"{self.file.path} has {self._prefix + key} = {count!r:.80}; it must be a whole "
                f"number from {least} to {MOST_LAYERS}."
            )

    def _waive(self, *patterns: str) -> None:
        """Keys that change nothing here."""
        for key in self.file.metadata:
            if any(fnmatchcase(key, self._prefix + pattern) for pattern in patterns):
                self._read.add(key)

    def _check_dense(self, names: set[str]) -> None:
        """Layers behind the pooling have the sizes that the metadata states."""
        for name in {f"{dense}.weight" for dense in GGUF_DENSE} & names:
            shape, dense = self.file.info(name).shape, name.partition(".")[0]
            if len(shape) != 2:
                raise CheckpointError(f"{self.file.path}: {name} {list(shape)} is no matrix.")
            self.expect(f"{dense}_feat_out", shape[0])
            self.expect(f"{dense}_feat_in", shape[1])

    def _heads_per_layer(self) -> dict[str, Any]:
        """K/V heads of each layer, of which one with a convolution has none."""
        found = self.per_layer("attention.head_count_kv")
        if found is None:
            return {}
        has_convolutions = "shortconv.l_cache" in KEYS[self.family]
        counts = sorted(set(found) - ({0} if has_convolutions else set()))
        if len(counts) != 1:
            shown = " and with ".join(f"{count!s:.20}" for count in counts[:4]) or "no"
            shown += " and with others" if len(counts) > 4 else ""
            raise UnsupportedModelError(
                f"{self.file.path} has layers with {shown} K/V heads, which rooflax does not "
                f"compute."
            )
        types = ["full_attention" if heads else "conv" for heads in found]
        return {"num_key_value_heads": counts[0]} | (
            {"layer_types": types} if has_convolutions else {}
        )

    def _delta(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The gated delta rule's value heads, its layers, and the count without further ones."""
        self._waive("rope.dimension_sections", "nextn_predict_layers")
        layers, more = raw.get("num_hidden_layers"), self.get("nextn_predict_layers", 0)
        count = layers - more if type(layers) is int and type(more) is int else layers
        found = {"num_hidden_layers": count}
        inner, heads = self.get("ssm.inner_size"), raw.get("linear_num_value_heads")
        if type(inner) is int and type(heads) is int and heads > 0:
            found["linear_value_head_dim"] = inner // heads
        interval = self.get("full_attention_interval")
        recurrent = self.per_layer("attention.recurrent_layers")
        if recurrent is not None:
            kinds = "full_attention", "linear_attention"
            found["layer_types"] = [kinds[bool(flag)] for flag in recurrent[:count]]
        elif interval is not None:
            found["full_attention_interval"] = interval
        return found

    def _dense_first(self, raw: dict[str, Any], names: set[str]) -> dict[str, Any]:
        """Without the layers that predict further tokens, which files count too."""
        layers, more = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers", 0)
        count = layers - more if type(layers) is int and type(more) is int else layers
        if is_latent(self.family):
            return {"num_hidden_layers": count}
        self.expect("expert_gating_func", 2)  # sigmoids
        for key in ("expert_group_count", "expert_group_used_count"):
            self.expect(key, 1)
        return {"num_hidden_layers": count, "use_qk_norm": "blk.0.attn_q_norm.weight" in names}

    def _latent(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Latent attention, of which files have the one key and value; old ones those of heads."""
        self.expect("expert_gating_func", 1, 2)  # softmax, sigmoids
        heads, turned = raw.get("num_attention_heads"), raw.get("qk_rope_head_dim")
        rank, size = raw.get("kv_lora_rank"), self.get("attention.key_length_mla")
        if is_old := size is None:
            size = self.get("attention.key_length")
        elif type(rank) is int and type(turned) is int:
            self.expect("attention.key_length", rank + turned)
            self.expect("attention.value_length", rank)
        self.expect("attention.head_count_kv", heads if is_old else 1)
        if type(size) is not int or type(turned) is not int:
            raise CheckpointError(
                f"{self.file.path} has heads of {size!r:.20} dimensions, of which RoPE turns "
                f"{turned!r:.20}; these must be whole numbers."
            )
        theta = raw.get("rope_theta", 10_000.0)
        found = {"num_key_value_heads": heads, "qk_nope_head_dim": size - turned}
        if is_old:
            found["v_head_dim"] = self.get("attention.value_length")
        if self.family in GROUP_METHODS and raw["n_group"] != 1:
            found["topk_method"] = GROUP_METHODS[self.family]
        return found | {
            "q_lora_rank": raw.get("q_lora_rank") or None,
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(turned, theta),
        }

    def _kinds(self) -> dict[str, Any]:
        """What differs by layer."""
        flags = self.per_layer("attention.sliding_window_pattern")
        heads = self.per_layer("attention.head_count_kv")
        widths = self.per_layer("feed_forward_length")
        named = [re.fullmatch(r"blk\.(\d+)\.attn_(k|v)\.weight", n) for n in self.file.names()]
        keys, values = ({m[1] for m in named if m and m[2] == part} for part in "kv")
        found: dict[str, Any] = {
            "attention_k_eq_v": bool(keys - values),
            "enable_moe_block": bool(self.get("expert_count", 0)),
            "final_logit_softcapping": self.get("final_logit_softcapping") or None,
        }
        if heads and flags:
            by_kind = dict(zip(flags, heads, strict=False))
            self._check_layers("attention.head_count_kv", heads, [by_kind.get(f) for f in flags])
            found["num_key_value_heads"] = by_kind.get(True, heads[0])
            found["num_global_key_value_heads"] = by_kind.get(False, heads[-1])
        if widths:
            first, last, shared = widths[0], widths[-1], self.get("attention.shared_kv_layers", 0)
            own = len(widths) - shared if type(shared) is int else 0
            wanted = [last if i >= own else first for i in range(len(widths))]
            self._check_layers("feed_forward_length", widths, wanted)
            found["intermediate_size"] = first
            found["use_double_wide_mlp"] = last != first
        return found

    def _check_layers(self, key: str, found: list[Any], wanted: list[Any]) -> None:
        if found != wanted:
            raise UnsupportedModelError(
                f"{self.file.path} has {self._prefix + key} = {found!r:.80}, which differs within "
                f"a kind of layers."
            )

    def _kinds_whole(self, raw: dict[str, Any]) -> dict[str, Any]:
        """RoPE of layers without a window and with one, and the rows of their embeddings."""
        for end, key in (("", "global_head_dim"), ("_swa", "head_dim")):
            self.expect(f"attention.value_length{end}", raw.get(key))
            self.expect(f"rope.dimension_count{end}", raw.get(key))
        self.expect("attention.causal", True)
        theta, local = self.get("rope.freq_base", 1e4), self.get("rope.freq_base_swa", 1e4)
        full = self._recovered(raw.get("global_head_dim"), theta, "proportional")
        ropes = {
            "full_attention": full | {"rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        return {"rope_parameters": ropes, "vocab_size_per_layer_input": raw.get("vocab_size")}

    def _window_layers(self) -> dict[str, Any]:
        """`layer_types`, which files have as a flag of each layer."""
        key = f"{self._prefix}attention.sliding_window_pattern"
        flags = self.file.metadata.get(key)
        if not isinstance(flags, list | np.ndarray):
            return {}
        self._read.add(key)
        return {"layer_types": layer_types(tuple(1 if flag else None for flag in flags))}

    def _attention_and_rope(self, raw: dict[str, Any]) -> dict[str, Any]:
        heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
        head_dim = raw.get("head_dim")
        if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            head_dim = hidden // heads
        self.expect("attention.value_length", head_dim)
        partial = {}
        if self.family in PARTIAL and isinstance(head_dim, int) and head_dim > 0:
            dim = self.get("rope.dimension_count", head_dim)
            partial = {"partial_rotary_factor": dim / head_dim if type(dim) is int else dim}
        else:
            self.expect("rope.dimension_count", head_dim)
        self.expect("attention.causal", not self._both_ways)
        self.expect("pooling_type", 0, *GGUF_POOLING)
        if "expert_count" not in KEYS[self.family]:
            self.expect("expert_count", 0)
            self.expect("expert_used_count", 0)
        scale = self.get("attention.scale") if "attention.scale" in KEYS[self.family] else 1
        if not scale and type(head_dim) is int and head_dim > 0:  # llama.cpp's where it is absent
            partial["attention_multiplier"] = head_dim**-0.5
        theta = raw.get("rope_theta", 10_000.0)
        if "rope.freq_base_swa" not in KEYS[self.family]:
            self.expect("rope.freq_base_swa", theta)
        scaling = self._rope_scaling(head_dim, theta)
        if self.family in UNTRUNCATED and scaling["rope_type"] == "yarn":
            scaling["truncate"] = False
        return {"rope_theta": theta, "rope_scaling": scaling} | partial

    def _rope_scaling(self, head_dim: Any, theta: Any) -> dict[str, Any]:
        kind = self.get("rope.scaling.type", "linear")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear"))
        if all(name in self.file.names() for name in LONGROPE_FACTORS.values()):
            return self._longrope()
        for harmless in ("finetuned", "yarn_ext_factor"):
            self.expect(f"rope.scaling.{harmless}", True, False, 1.0)
        if kind != "yarn" or is_latent(self.family):
            self.expect("rope.scaling.attn_factor", 1.0)
        if ROPE_FACTORS in self.file.names():
            if factor not in (None, 0.0, 1.0):
                raise UnsupportedModelError(
                    f"{self.file.path} scales RoPE both by {ROPE_FACTORS} and by its metadata."
                )
            return self._recovered(head_dim, theta, "llama3")
        if self.family in SCALED_THETA:
            self.get("rope.scaling.original_context_length")
        if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            times = self.get("rope.scaling.attn_factor", 1.0)
            if times != 1.0 and _is_positive(times) and _is_positive(factor):  # beside llama.cpp's
                scaling["attention_factor"] = times * (1 + 0.1 * math.log(factor))
            found = {hf: self.get(f"rope.scaling.{key}") for key, hf in YARN.items()}
            scaling |= {hf: value for hf, value in found.items() if value is not None}
        if self.family in SCALES_QUERIES:
            scaling["llama_4_scaling_beta"] = self.get("attention.temperature_scale")
            scaling |= {"mscale_all_dim": self.get("rope.scaling.yarn_log_multiplier")}
            scaling |= {"mscale": 1.0} if scaling["mscale_all_dim"] else {}
        times = self.get("rope.scaling.yarn_log_multiplier") if is_latent(self.family) else None
        if isinstance(times, float) and times:  # of these files alone, a tenth
            scaling |= dict.fromkeys(
                ("mscale", "mscale_all_dim"), float(str(np.float32(times * 10)))
            )
        return {key: value for key, value in scaling.items() if value is not None}

    def _longrope(self) -> dict[str, Any]:
        """Its two sets of factors, which are tensors; numbers as config.json had them."""
        found: dict[str, Any] = {"rope_type": "longrope"}
        for hf, name in LONGROPE_FACTORS.items():
            if self.file.info(name).dtype != "F32":
                raise CheckpointError(f"{self.file.path}: {name} is not F32.")
            found[hf] = [float(str(x)) for x in np.ravel(self.file.read(name))]
        factor = self.get("rope.scaling.attn_factor")
        return found | ({"attention_factor": factor} if factor is not None else {})

    def _recovered(self, head_dim: Any, theta: Any, kind: str) -> dict[str, Any]:
        if ROPE_FACTORS not in self.file.names():
            raise CheckpointError(f"{self.file.path} has no tensor {ROPE_FACTORS!r}.")
        info = self.file.info(ROPE_FACTORS)
        if not _is_positive(theta) or not LEAST <= theta <= MOST:
            raise CheckpointError(
                f"{self.file.path} has rope.freq_base = {theta!r:.80}; RoPE takes {LEAST:g} to "
                f"{MOST:g}."
            )
        if not isinstance(head_dim, int) or info.dtype != "F32" or info.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{self.file.path}: {ROPE_FACTORS} is {info.dtype} {list(info.shape)}; wanted F32 "
                f"and one factor for each of half the head's {head_dim} dimensions."
            )
        divisors = np.array(self.file.read(ROPE_FACTORS), np.float64)
        recover = llama3_scaling if kind == "llama3" else proportional_scaling
        found = recover(divisors, inverse_frequencies(head_dim, float(theta), None))
        if found is None:
            raise UnsupportedModelError(
                f"{self.file.path}: {ROPE_FACTORS} does not hold the factors of {kind} scaling."
            )
        return found

    def check_required(self) -> None:
        """Keys that llama.cpp wants of every file, where families have a default."""
        for suffix in (*REQUIRED, *REQUIRED_OF.get(self.family, ())):
            keys = [key for key in KEYS[self.family] if key.endswith(suffix)]
            if keys and all(self.get(key) is None for key in keys):
                raise CheckpointError(
                    f"{self.file.path} has no {self._prefix}{keys[0]}, which every such file has."
                )

    def finish(self, ignore: Sequence[str]) -> None:
        """Rejects the architecture's keys that were not read."""
        check_waived(ignore, self.file.metadata, str(self.file.path))
        for key in self.file.metadata:
            known = not key.startswith(self._prefix) or key in self._read
            if not known and not any(fnmatchcase(key, pattern) for pattern in ignore):
                shown = key[:200]  # as long as the file likes
                raise UnsupportedModelError(
                    f"{self.file.path} has the metadata {shown!r}, which rooflax does not read; "
                    f"if that changes no logit, pass ignore_config_keys {shown}."
                )


def _is_positive(value: Any) -> bool:
    """Whether it is a number above zero."""
    return type(value) in (int, float) and value > 0


def is_latent(family: str) -> bool:
    """Whether the family's attention is latent attention."""
    return "attention.kv_lora_rank" in KEYS[family]


def _query_scale(raw: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3's; the metadata has none, and llama.cpp knows the 27B model by its 62 layers."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if raw.get("num_hidden_layers") == 62 and heads and isinstance(hidden, int):
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": raw.get("head_dim", 256)}


def llama3_scaling(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """The `rope_scaling` from which llama3's divisors were made; None if there is none.

        1 / divisor = keep + (1 - keep) / factor,  keep = clip((turns - low) / (high - low), 0, 1)

    with turns = original / wavelength, linear in the frequency. So two divisors inside the band
    give original / (high - low) and low / (high - low); `low` is 1, as in every checkpoint.
    """
    if not np.isfinite(divisors).all() or (divisors < 1 - MAX_FACTOR_ERROR).any():
        return None
    factor = float(str(np.float32(divisors.max())))
    if factor <= 1 + MAX_FACTOR_ERROR:
        return {"rope_type": "default"}
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    inside = np.flatnonzero((keep > 1e-4) & (keep < 1 - 1e-4))
    if len(inside) < 2:
        return None
    slope, start = np.polyfit(frequencies[inside].astype(np.float64), keep[inside], 1)
    if not slope > 0 > start:
        return None
    high = float(f"{1 - 1 / start:.4g}")
    original = round(slope * 2 * math.pi * (high - 1))
    turns = original * frequencies / (2 * math.pi)
    kept = np.clip((turns - 1) / (high - 1), 0, 1)
    wanted = 1 / (kept + (1 - kept) / factor)
    if original < 1 or not np.allclose(divisors, wanted, rtol=MAX_FACTOR_ERROR, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def proportional_scaling(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """The `rope_scaling` of which the first frequencies turn and the others are still; None if the
    divisors are others."""
    half = len(frequencies)
    count = int((divisors < STILL / 2).sum())
    factor, share = float(str(np.float32(divisors[0]))), count / half
    wanted = np.where(np.arange(half) < count, factor, STILL)
    same = np.allclose(divisors, wanted, rtol=MAX_FACTOR_ERROR, atol=0)
    if not same or int(share * 2 * half // 2) != count:
        return None
    return {"rope_type": "proportional", "factor": factor, "partial_rotary_factor": share}


def end_texts(control: Sequence[str]) -> list[str]:
    """Those of a vocabulary's control tokens that end an answer, whatever else the file names."""
    left_out = {ENDS_A_MESSAGE} if "<|return|>" in control else set()
    return [text for text in END_TEXTS if text in control and text not in left_out]


def _end_tokens(file: Header) -> dict[str, Any]:
    """`eos_token_id` and `bos_token_id`: what the file names, and control tokens known to end."""
    found = dict(file.metadata)
    ends = [found.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = found.get("tokenizer.ggml.tokens"), found.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        control = [tokens[i] for i in np.flatnonzero((types == 3) | (types == 4))]
        ends += [tokens.index(text) for text in end_texts(control)]
    bos = found.get("tokenizer.ggml.bos_token_id")
    ids = list(dict.fromkeys(i for i in ends if type(i) is int))
    return {"eos_token_id": ids, "bos_token_id": bos if type(bos) is int else None}


def gguf_generation_defaults(file: Header) -> GenerationDefaults:
    """What a file recommends for generation, and the ids that end a sequence.

    Raises:
        CheckpointError: a value has the wrong type or range.
    """
    found = {hf: file.metadata.get(f"general.sampling.{key}") for key, hf in SAMPLING_KEYS.items()}
    found["do_sample"] = True if _is_positive(found["temperature"]) else None
    found["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    return generation_defaults(found | _end_tokens(file), file.path)
