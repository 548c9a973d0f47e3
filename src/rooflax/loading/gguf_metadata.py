"""Writes a model's GGUF metadata, the inverse of `gguf_config`.

The families declare the keys (`GGUFSpec`). What a file cannot say is found by reading the metadata
back: the architecture that llama.cpp would compute must be the model's own, or the key of
config.json that differs is named.

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
from rooflax.loading.gguf_config import SAMPLING_KEYS, read_gguf_config
from rooflax.loading.safetensors import TensorInfo
from rooflax.models.gguf import (
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    STILL,
    YARN,
    GGUFSpec,
    Metadata,
    full_rope,
)
from rooflax.models.registry import family, gguf_families
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import EPS, LatentAttention
from rooflax.nn.rope import inverse_frequencies

FLOATS = (
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base",
    "rope.freq_base_swa", "attention.scale", "embedding_scale", "residual_scale", "logit_scale",
    "expert_weights_scale", "final_logit_softcapping",
)  # fmt: skip
"""Keys whose values are floats, also where config.json has a whole number."""
DIVIDED = ("llama3", "proportional")
"""Scalings of RoPE that files keep as divisors."""
CLOSE = 1e-6
"""Relative difference of two numbers that one float32 stands for."""


class HeaderOnly:
    """File of which only the header exists, as `gguf_config` reads it.

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


def written_spec(name: str) -> GGUFSpec:
    """
    Raises:
        UnsupportedModelError: files of the family are not written.
    """
    specs = {family: spec for family, spec in gguf_families().items() if spec.is_written}
    if name not in specs:
        written = ", ".join(sorted(specs))
        raise UnsupportedModelError(f"rooflax writes no GGUF files of {name}, only of {written}.")
    return specs[name]


def architecture_metadata(config: Decoder, raw: Mapping[str, Any]) -> Metadata:
    """The architecture's keys.

    Args:
        raw: config.json, as the family writes it.

    Raises:
        UnsupportedModelError: files of the family are not written.
    """
    spec = written_spec(raw["model_type"])
    values = {key: raw[hf] for key, hf in spec.keys.items() if raw.get(hf) is not None}
    values |= _positions(spec, config) | _layers(spec, config, raw)
    values = {key: float(value) if key in FLOATS else value for key, value in values.items()}
    architecture = spec.architecture
    if not config.is_causal:
        values["attention.causal"] = False
        architecture = spec.both_ways or architecture  # the causal one's would be read as causal
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": architecture} | named


def _positions(spec: GGUFSpec, config: Decoder) -> Metadata:
    """Sizes of heads, and RoPE; tensors of its factors are `rope_tensors`."""
    if config.learned_positions:
        return {}
    size = _head_dim(config)
    keys: Metadata = {"attention.key_length": size, "attention.value_length": size}
    if not config.ropes:
        return keys | {"rope.scaling.finetuned": False, "rope.dimension_count": size}
    rope = full_rope(config)
    keys |= {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim or size}
    scaling = rope.scaling
    if scaling is None or scaling.kind in DIVIDED:
        return keys
    keys["rope.scaling.type"] = scaling.kind
    if scaling.kind == "longrope":
        return keys | {
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.attn_factor": scaling.attention_factor,
        }
    keys["rope.scaling.factor"] = scaling.factor
    if scaling.kind == "linear":
        return keys
    hf = scaling.to_hf()
    keys |= {f"rope.scaling.{key}": hf[name] for key, name in YARN.items()}
    if isinstance(config.attention, LatentAttention):
        del keys["rope.scaling.yarn_attn_factor"]
        return keys | {"rope.scaling.yarn_log_multiplier": 0.1 * config.attention.mscale}
    if spec.scales_queries:  # its logarithm's factor cancels llama.cpp's own
        return keys | {
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": rope.query_beta,
        }
    default_factor = 1 + 0.1 * math.log(scaling.factor)
    if math.isclose(scaling.attention_factor, default_factor, rel_tol=CLOSE):
        del keys["rope.scaling.yarn_attn_factor"]
    else:
        keys["rope.scaling.attn_factor"] = scaling.attention_factor / default_factor
    return keys


def _head_dim(config: Decoder) -> int:
    """Head size of layers without a window, if there are some, else of all."""
    sizes = {attention.window is None: attention.head_dim for attention in config.attentions}
    return sizes.get(True, config.head_dim)


def _layers(spec: GGUFSpec, config: Decoder, raw: Mapping[str, Any]) -> Metadata:
    """Keys that differ by layer, and further keys that llama.cpp wants of a family."""
    values: Metadata = {}
    windows = [layer.attention.window for layer in config.layers]
    if spec.ignores_window:
        values["attention.sliding_window"] = windows[0] or 0
    elif "attention.sliding_window" in spec.keys and len(set(windows)) > 1:
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    values |= spec.write(config, dict(raw))
    return values | ({"expert_gating_func": 2} if config.moe and config.moe.biased else {})


def rope_tensors(config: Decoder) -> dict[str, np.ndarray]:
    """Divisors of RoPE's frequencies, float32, where its scaling is kept as such."""
    if not config.ropes or full_rope(config).scaling is None:
        return {}
    rope = full_rope(config)
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
    """Metadata of the checkpoint's generation defaults."""
    if not defaults.do_sample:
        return {}
    values = {key: defaults.sampling.get(hf) for key, hf in SAMPLING_KEYS.items()}
    floats = {k: v if k == "top_k" else float(v) for k, v in values.items() if v is not None}
    return {f"general.sampling.{key}": value for key, value in floats.items()}


def check_metadata(header: HeaderOnly, name: str, config: Decoder) -> None:
    """Whether a file of these metadata and tensors is the model.

    Raises:
        UnsupportedModelError: it names what llama.cpp would compute otherwise, or does not compute.
    """
    if reason := _not_computed(gguf_families()[name], config, header.names()):
        raise UnsupportedModelError(f"llama.cpp computes no {name} {reason}.")
    try:
        _, reread, _ = read_gguf_config(header)
    except RooflaxError as error:
        raise UnsupportedModelError(
            f"no GGUF file can say what this model is: {str(error).removeprefix(f'{header.path}')}"
        ) from error
    wanted, written = (family(name).config_to_hf(each) for each in (config, reread))
    for key in wanted:
        if not _same(wanted[key], written.get(key)):
            raise UnsupportedModelError(
                f"a GGUF file of {name} cannot say {key} = {wanted[key]!r:.80}: llama.cpp would "
                f"compute {written.get(key)!r:.80}."
            )


def _not_computed(spec: GGUFSpec, config: Decoder, tensors: Sequence[str]) -> str | None:
    """Reasons why llama.cpp does not compute this model, though it opens others of the family."""
    ends = {tensor.partition(".")[2].partition(".")[2] for tensor in tensors}
    biases = {"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}
    if spec.square and config.num_heads * config.head_dim != config.hidden_size:
        return (
            f"whose {config.num_heads} heads of {config.head_dim} dimensions are not as wide as "
            f"its hidden size, {config.hidden_size}"
        )
    if spec.tied is not None and config.tied_embeddings != spec.tied:
        return f"whose head is {'not ' * spec.tied}the embedding"
    if "attn_output.bias" in ends and not spec.output_bias:
        return "with a bias on attention's result"
    if biases & ends and not spec.mlp_bias:
        return "with biases in feed-forward networks"
    return spec.lacks(config)


def otherwise(name: str, config: Decoder) -> list[str]:
    """A sentence for each thing that llama.cpp computes otherwise in every file of a family."""
    notes, rope = [], full_rope(config) if config.ropes else None
    window = config.attention.window
    if gguf_families()[name].ignores_window and window is not None:
        notes.append(f"llama.cpp attends to all tokens, and the model to the last {window}")
    part, eps = config.attention, config.norm.eps
    if isinstance(part, LatentAttention) and eps != EPS:
        notes.append(f"llama.cpp has {eps:g} in the norms of latents, too, and the model {EPS:g}")
    if config.moe and config.moe.groups > 1 and not config.moe.biased:
        notes.append("llama.cpp chooses groups by their best two experts, and the model by one")
    if rope and rope.scaling and rope.scaling.kind == "yarn" and not rope.scaling.truncate:
        notes.append(
            "llama.cpp rounds the band of YaRN to whole dimensions, and the model does not"
        )
    return notes


def _same(a: Any, b: Any) -> bool:
    """Equal, floats as far as float32 goes."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=CLOSE)
    return a == b
