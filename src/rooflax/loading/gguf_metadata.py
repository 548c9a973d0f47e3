"""From a model to the metadata of a GGUF file: what `gguf_config` reads, the other way round.

The same tables name the keys. What a file cannot say is found by reading the metadata back: the
architecture that llama.cpp would compute must be the model's own, or the key of config.json that
differs is named.

Source: https://github.com/ggml-org/llama.cpp, conversion/ and src/models/ (which keys it asks for).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import RooflaxError, UnsupportedModelError
from rooflax.loading.generation_config import GenerationDefaults
from rooflax.loading.gguf_config import (
    ALIASES,
    BOTH_WAYS,
    EXAONE4_WINDOWED,
    FAMILIES,
    HEADS_PER_KIND,
    KEYS,
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    SAMPLING_KEYS,
    SCALES_QUERIES,
    STILL,
    YARN,
    is_latent,
    read_gguf_config,
)
from rooflax.loading.safetensors import TensorInfo
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import EPS, LatentAttention
from rooflax.nn.recurrent import GatedDelta
from rooflax.nn.rope import Rope, inverse_frequencies

ARCHITECTURES = {ours: arch for arch, ours in FAMILIES.items()} | ALIASES
"""Our family to a file's architecture."""
OF_BOTH_WAYS = {ours: arch for arch, ours in BOTH_WAYS.items()}
"""The same where tokens attend both ways."""

FLOATS = (
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base",
    "rope.freq_base_swa", "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
    "expert_weights_scale", "final_logit_softcapping",
)  # fmt: skip
"""Keys whose values are floats, also where config.json has a whole number."""
SQUARE = (
    "qwen2", "qwen2_moe", "olmo2", "olmo3", "phi3", "exaone4", "cohere2", "lfm2",
)  # fmt: skip
"""Families of which llama.cpp wants heads as wide as the hidden states together."""
UNTIED = ("gpt_oss", "olmo2", "olmo3", "qwen2_moe")
"""Families of which llama.cpp wants a head of its own."""
TIED = ("cohere2",)
"""Families of which it takes the embedding for the head."""
ONE_WINDOW = ("phi3",)
"""Families whose window, of all layers, it reads and does not apply."""
LOCAL_THETA = ("gemma3_text", "gemma4_text")
"""Families of which it wants the theta of layers with a window."""
PLAIN_ROPE = ("qwen3_next",)
"""Families with the gated delta rule that have no positions of images."""
WINDOWED_BY_DEPTH = ("exaone4",)
OUTPUT_BIASES = (
    "gpt2", "llama", "mistral", "mixtral", "gpt_oss", "granite", "granitemoehybrid", "ernie4_5",
    "ministral3",
)  # fmt: skip
"""Families of which llama.cpp adds a bias to attention's result."""
MLP_BIASES = ("gpt2", "llama", "granite", "gpt_oss")
"""Families of which llama.cpp adds biases in feed-forward networks."""
LISTS_MERGES = ("gemma4_text",)
"""Families whose SentencePiece tokenizers llama.cpp wants with a list of merges."""
PLAIN_QUERIES = (26, 27)
"""Layers of the DeepSeek models whose queries have no latent, by which llama.cpp knows them."""
DIVIDED = ("llama3", "proportional")
"""Scalings of RoPE that files keep as divisors."""
CLOSE = 1e-6
"""Of two numbers that one float32 stands for."""

Metadata = dict[str, Any]
"""By key: bool, int, float, str, a list of one of them, or an array."""


class HeaderOnly:
    """What `gguf_config` asks of a file, of one that is not written yet.

    Args:
        path: for errors.
        metadata: as a file gives it.
        infos: of the tensors.
        tensors: those that are read beside the metadata.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        infos: Mapping[str, TensorInfo],
        tensors: Mapping[str, np.ndarray],
    ):
        self.path, self._infos, self._tensors = path, infos, tensors
        self.metadata = {key: _as_read(value) for key, value in metadata.items()}

    def names(self) -> list[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


def _as_read(value: Any) -> Any:
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value


def architecture_metadata(config: Decoder, raw: Mapping[str, Any]) -> Metadata:
    """The architecture's keys.

    Args:
        raw: config.json, as the family writes it.

    Raises:
        UnsupportedModelError: files of the family are not written.
    """
    name = raw["model_type"]
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"rooflax writes no GGUF files of {name}, only of {', '.join(sorted(ARCHITECTURES))}."
        )
    found = {key: raw[hf] for key, hf in KEYS[name].items() if raw.get(hf) is not None}
    found |= _positions(name, config) | _layers(name, config, raw)
    found = {key: float(value) if key in FLOATS else value for key, value in found.items()}
    architecture = ARCHITECTURES[name]
    if not config.is_causal:
        found["attention.causal"] = False
        architecture = OF_BOTH_WAYS.get(name, architecture)  # another's would be read as causal
    named = {f"{architecture}.{key}": value for key, value in found.items()}
    return {"general.architecture": architecture} | named


def _positions(name: str, config: Decoder) -> Metadata:
    """Sizes of heads, and RoPE; tensors of its factors are `rope_tensors`."""
    if config.learned_positions:
        return {}
    size = _head_dim(config)
    found: Metadata = {"attention.key_length": size, "attention.value_length": size}
    if not config.ropes:
        return found | {"rope.scaling.finetuned": False, "rope.dimension_count": size}
    rope = _rope(config)
    found |= {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim or size}
    scaling = rope.scaling
    if scaling is None or scaling.kind in DIVIDED:
        return found
    found["rope.scaling.type"] = scaling.kind
    if scaling.kind == "longrope":
        return found | {
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.attn_factor": scaling.attention_factor,
        }
    found["rope.scaling.factor"] = scaling.factor
    if scaling.kind == "linear":
        return found
    hf = scaling.to_hf()
    found |= {f"rope.scaling.{key}": hf[name] for key, name in YARN.items()}
    if isinstance(config.attention, LatentAttention):
        del found["rope.scaling.yarn_attn_factor"]
        return found | {"rope.scaling.yarn_log_multiplier": 0.1 * config.attention.mscale}
    if name in SCALES_QUERIES:  # its logarithm's factor cancels llama.cpp's own
        return found | {
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": rope.query_beta,
        }
    own = 1 + 0.1 * math.log(scaling.factor)
    if math.isclose(scaling.attention_factor, own, rel_tol=CLOSE):
        del found["rope.scaling.yarn_attn_factor"]
    else:
        found["rope.scaling.attn_factor"] = scaling.attention_factor / own
    return found


def _head_dim(config: Decoder) -> int:
    """That of layers without a window, where there are some."""
    sizes = {attention.window is None: attention.head_dim for attention in config.attentions}
    return sizes.get(True, config.head_dim)


def _rope(config: Decoder) -> Rope:
    """That of layers without a window, where there are some."""
    ropes = {layer.attention.window is None: layer.attention.rope for layer in config.layers[::-1]
             if layer.attention.rope is not None}  # fmt: skip
    return ropes.get(True) or config.ropes[0]


def _layers(name: str, config: Decoder, raw: Mapping[str, Any]) -> Metadata:
    """What differs by layer, and what llama.cpp wants of a family beside the common keys."""
    found: Metadata = {}
    windows = [layer.attention.window for layer in config.layers]
    is_mixed = len(set(windows)) > 1
    if name in ONE_WINDOW:
        found["attention.sliding_window"] = windows[0] or 0
    elif "attention.sliding_window" in KEYS[name] and is_mixed:
        found["attention.sliding_window_pattern"] = [window is not None for window in windows]
    local = next((x.rope for x in config.attentions if x.window and x.rope), None)
    if name in LOCAL_THETA and local:
        found["rope.freq_base_swa"] = local.theta
    if name in HEADS_PER_KIND:
        found |= _kinds(raw, windows)
    if isinstance(config.attention, LatentAttention):
        found |= _latent(config.attention)
    if config.moe and config.moe.biased:
        found["expert_gating_func"] = 2
    if "shortconv.l_cache" in KEYS[name]:
        heads = config.num_kv_heads
        types = raw["layer_types"]
        found["attention.head_count_kv"] = [0 if kind == "conv" else heads for kind in types]
    delta = next((x.attention for x in config.layers if isinstance(x.attention, GatedDelta)), None)
    if delta is not None:
        found |= _delta(name, config, delta)
    return found


def _latent(part: LatentAttention) -> Metadata:
    """Sizes of heads, and of the one key and value that files have of latent attention."""
    return {
        "attention.head_count_kv": 1,
        "attention.value_length": part.rank,
        "attention.key_length_mla": part.nope_dim + part.rope_dim,
        "attention.q_lora_rank": part.query_rank or 0,  # llama.cpp wants the key
        "rope.dimension_count": part.rope_dim,
    }


def _kinds(raw: Mapping[str, Any], windows: Sequence[int | None]) -> Metadata:
    """Heads of layers with a window, and wider networks of layers without keys of their own."""
    size, width = raw["head_dim"], raw["intermediate_size"]
    found: Metadata = {"attention.value_length_swa": size, "rope.dimension_count_swa": size}
    found["final_logit_softcapping"] = raw["final_logit_softcapping"] or 0.0  # absent is 30
    found["attention.head_count_kv"] = [
        raw["num_global_key_value_heads" if window is None else "num_key_value_heads"]
        for window in windows
    ]
    if raw["use_double_wide_mlp"]:
        own = len(windows) - raw["num_kv_shared_layers"]
        found["feed_forward_length"] = [
            width if index < own else 2 * width for index in range(len(windows))
        ]
    return found


def _delta(name: str, config: Decoder, part: GatedDelta) -> Metadata:
    if part.value_dim != part.key_dim:
        raise UnsupportedModelError(
            f"llama.cpp computes {name} with one size of key and value heads; the model has "
            f"linear_key_head_dim = {part.key_dim} and linear_value_head_dim = {part.value_dim}."
        )
    found: Metadata = {
        "ssm.inner_size": part.num_heads * part.group * part.value_dim,
        "attention.recurrent_layers": [
            isinstance(layer.attention, GatedDelta) for layer in config.layers
        ],
    }
    if name not in PLAIN_ROPE:  # of RoPE's frequencies, how many turn by time, height and width
        half = (_rope(config).dim or config.head_dim) // 2
        found["rope.dimension_sections"] = [-(-(half - i) // 3) for i in range(3)] + [0]
    return found


def rope_tensors(config: Decoder) -> dict[str, np.ndarray]:
    """Divisors of RoPE's frequencies, float32, where its scaling is kept as such."""
    if not config.ropes or _rope(config).scaling is None:
        return {}
    rope = _rope(config)
    scaling, size = rope.scaling, rope.dim or _head_dim(config)
    assert scaling is not None
    if scaling.kind == "longrope":
        return {
            name: np.asarray(getattr(scaling, hf), np.float32)
            for hf, name in LONGROPE_FACTORS.items()
        }
    if scaling.kind not in DIVIDED:
        return {}
    plain, scaled = (inverse_frequencies(size, rope.theta, s) for s in (None, scaling))
    with np.errstate(divide="ignore"):
        return {ROPE_FACTORS: np.minimum(plain / scaled, STILL).astype(np.float32)}


def sampling_metadata(defaults: GenerationDefaults) -> Metadata:
    """What the checkpoint recommends for generation."""
    if not defaults.do_sample:
        return {}
    found = {key: defaults.sampling.get(hf) for key, hf in SAMPLING_KEYS.items()}
    floats = {k: v if k == "top_k" else float(v) for k, v in found.items() if v is not None}
    return {f"general.sampling.{key}": value for key, value in floats.items()}


def check_metadata(header: HeaderOnly, name: str, config: Decoder) -> None:
    """Whether a file of these metadata and tensors is the model.

    Raises:
        UnsupportedModelError: it names what llama.cpp would compute otherwise, or does not compute.
    """
    if reason := _not_computed(name, config, header.names()):
        raise UnsupportedModelError(f"llama.cpp computes no {name} {reason}.")
    try:
        _, found, _ = read_gguf_config(header)
    except RooflaxError as error:
        raise UnsupportedModelError(
            f"no GGUF file can say what this model is: {str(error).removeprefix(f'{header.path}')}"
        ) from error
    wanted, written = (family(name).config_to_hf(each) for each in (config, found))
    for key in wanted:
        if not _same(wanted[key], written.get(key)):
            raise UnsupportedModelError(
                f"a GGUF file of {name} cannot say {key} = {wanted[key]!r:.80}: llama.cpp would "
                f"compute {written.get(key)!r:.80}."
            )


def _not_computed(name: str, config: Decoder, tensors: Sequence[str]) -> str | None:
    """What llama.cpp, which opens the other models of a family, has not in this one."""
    ends = {tensor.partition(".")[2].partition(".")[2] for tensor in tensors}
    biases = {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}
    windows = {layer.attention.window for layer in config.layers}
    if name in SQUARE and config.num_heads * config.head_dim != config.hidden_size:
        return (
            f"whose {config.num_heads} heads of {config.head_dim} dimensions are not as wide as "
            f"its hidden size, {config.hidden_size}"
        )
    if name in UNTIED and config.tied_embeddings:
        return "whose head is the embedding"
    if name in TIED and not config.tied_embeddings:
        return "whose head is not the embedding"
    if "attn_output.bias" in ends and name not in OUTPUT_BIASES:
        return "with a bias on attention's result"
    if biases & ends and name not in MLP_BIASES:
        return "with biases in feed-forward networks"
    if is_latent(name) and (reason := _latent_not_computed(config)):
        return reason
    if name in WINDOWED_BY_DEPTH and windows != {None} and config.num_layers != EXAONE4_WINDOWED:
        return f"with windows in {config.num_layers} layers (only {EXAONE4_WINDOWED})"
    return _sharing(config) if name in HEADS_PER_KIND else None


def _latent_not_computed(config: Decoder) -> str | None:
    """Of latent attention: RoPE that scales other than scores, and latents it does not expect."""
    part, scaling = config.attention, _rope(config).scaling
    assert isinstance(part, LatentAttention)
    if scaling and not (part.mscale and scaling.attention_factor == 1):
        return "whose mscale and mscale_all_dim are not the same number"
    if part.query_rank and config.num_layers in PLAIN_QUERIES:
        return f"with a q_lora_rank in {config.num_layers} layers"
    return None


def _sharing(config: Decoder) -> str | None:
    """Of which layers llama.cpp takes keys and values otherwise."""
    attentions = [layer.attention for layer in config.layers]
    own = [attention.window is not None for attention in attentions if not attention.reuses_kv]
    if not any(own):
        return "without a window"
    if len(own) < len(attentions) and own[-2:] != [True, False]:
        return (
            "whose last two layers with keys and values of their own are not one with a window "
            "and then one without"
        )
    return None


def otherwise(name: str, config: Decoder) -> list[str]:
    """A sentence for each thing that llama.cpp computes otherwise in every file of a family."""
    found, rope = [], _rope(config) if config.ropes else None
    window = config.attention.window
    if name in ONE_WINDOW and window is not None:
        found.append(f"llama.cpp attends to all tokens, and the model to the last {window}")
    part, eps = config.attention, config.norm.eps
    if isinstance(part, LatentAttention) and eps != EPS:
        found.append(f"llama.cpp has {eps:g} in the norms of latents, too, and the model {EPS:g}")
    if config.moe and config.moe.groups > 1 and not config.moe.biased:
        found.append("llama.cpp chooses groups by their best two experts, and the model by one")
    if rope and rope.scaling and rope.scaling.kind == "yarn" and not rope.scaling.truncate:
        found.append(
            "llama.cpp rounds the band of YaRN to whole dimensions, and the model does not"
        )
    return found


def _same(a: Any, b: Any) -> bool:
    """Equal, floats as far as float32 goes."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=CLOSE)
    return a == b
