"""GPT-OSS: mixture of experts, attention sinks, alternating windows, YaRN.

The file is longer than others: the default of RoPE, the keys of experts and the names of tensors
are its own. Rejected: other layer patterns than full and sliding attention, other activations.

Source: transformers, models/gpt_oss/modeling_gpt_oss.py; openai/gpt-oss, gpt_oss/torch/model.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models.common import (
    layer_types,
    num_layers,
    read_attention,
    read_biases,
    read_decoder,
    read_experts,
    tiny,
    windowed_types,
    windows_of,
    write_decoder,
)
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_changes import KEEP, Interleaved, InterleavedBias, Transposed
from rooflax.models.gguf_names import COMMON, DOWN, GATE, POST_NORM, UP, WINDOW
from rooflax.models.rope_reader import read_rope
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import ATTENTION, MLP, Layer, Moe
from rooflax.nn.rope import Rope, RopeScaling
from rooflax.nn.tensor_layouts import Linear, Swapped, TensorLayout
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import NormKind
from rooflax.ops.linear import ClampedSwiglu

NO_SCALING = {"rope_type": "default"}
"""An absent scaling means DEFAULT_ROPE here, so none at all has to be said."""

DEFAULT_ROPE = RopeScaling("yarn", 32.0, 4096, truncate=False, attention_factor=1.3465735902799727)
"""RoPE that transformers assumes where config.json says nothing of it."""

NAMES = TensorNames(
    tuple(
        (f"layers.{{i}}.mlp.{key}", StoredAs(f"{MLP}.{hf}", layout))
        for key, hf, layout in (
            ("router", "router.weight", Linear()),
            ("gate_up", "experts.gate_up_proj", Swapped(2)),
            ("down", "experts.down_proj", TensorLayout()),
        )
    )
)
TINY = tiny(
    hidden_size=64, intermediate_size=32, num_hidden_layers=4, num_local_experts=5,
    num_experts_per_tok=3, sliding_window=7, attention_bias=True, rope_theta=150.0,
    rope_scaling={
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 12,
    },
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    parts = read_biases(reader, True) | {"sinks": True, "theta": None}
    attention = read_attention(reader, norm_eps=1e-5, kv_heads=8, head_dim=64, **parts)
    attention = replace(attention, rope=_read_rope(reader, attention.head_dim))
    window = reader.size("sliding_window", 128)
    count = num_layers(reader)
    alternating = layer_types(tuple(None if i % 2 else window for i in range(count)))
    types = windowed_types(reader, alternating)
    windows = (window if kind == "sliding_attention" else None for kind in types)
    moe = _read_moe(reader, attention.norm)
    layers = (Layer(replace(attention, window=w), moe) for w in windows)
    return replace(read_decoder(reader, layers, max_position=131_072), names=NAMES)


def _read_rope(reader: ConfigReader, head_dim: int) -> Rope:
    if reader.get("rope_parameters", None) is not None or reader.get("rope_scaling", None):
        rope = read_rope(reader, head_dim, 150_000.0)
    else:
        rope = Rope(reader.number("rope_theta", 150_000.0), DEFAULT_ROPE)
    if rope.scaling is not None and rope.scaling.original_max_position:
        # The original length, which RoPE's keys state too.
        reader.expect("initial_context_length", rope.scaling.original_max_position)
    return rope


def _read_moe(reader: ConfigReader, norm: NormKind) -> Moe:
    reader.expect("hidden_act", "silu")
    absent = reader.size("experts_per_token", 4)
    count, chosen = read_experts(reader, "num_local_experts", 128, absent)
    alpha, limit = reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0)
    width = reader.size("intermediate_size")
    return Moe(count, chosen, width, norm, ClampedSwiglu(alpha, limit), bias=True)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written, windows = write_decoder(decoder, "gpt_oss", "GptOssForCausalLM"), windows_of(decoder)
    moe = decoder.moe
    assert moe is not None
    assert isinstance(moe.activation, ClampedSwiglu)
    return written | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "sliding_window": next((w for w in windows if w), 128),
        "layer_types": layer_types(windows),
        "rope_scaling": written["rope_scaling"] or NO_SCALING,
        "swiglu_alpha": moe.activation.alpha,
        "swiglu_limit": moe.activation.limit,
        "attention_bias": decoder.layers[0].attention.qkv_bias,
    }


def _untruncated(raw: dict[str, Any]) -> dict[str, Any]:
    """YaRN of every checkpoint, which the metadata cannot say."""
    if raw["rope_scaling"]["rope_type"] == "yarn":
        raw["rope_scaling"]["truncate"] = False
    return raw


GGUF = GGUFSpec(
    "gpt-oss", tied=False, output_bias=True, mlp_bias=True,
    keys=COMMON | {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    } | WINDOW,
    required=("attention.sliding_window",),
    read=lambda reader, raw: _untruncated(reader.attention(raw)),
    tensors=POST_NORM | {
        f"{ATTENTION}.sinks": (("blk.{i}.attn_sinks.weight",), KEEP),
        f"{MLP}.experts.gate_up_proj": ((f"{GATE}.weight", f"{UP}.weight"), Interleaved()),
        f"{MLP}.experts.gate_up_proj_bias": ((f"{GATE}.bias", f"{UP}.bias"), InterleavedBias()),
        f"{MLP}.experts.down_proj": ((f"{DOWN}.weight",), Transposed()),
        f"{MLP}.experts.down_proj_bias": ((f"{DOWN}.bias",), KEEP),
    },
)  # fmt: skip
