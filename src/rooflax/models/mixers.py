"""Layers with the gated delta rule and gated attention in config.json and GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import Metadata, MetadataReader, Raw, full_rope
from rooflax.models.gguf_changes import KEEP, Decay, HeadKinds, Kernel, Tiled
from rooflax.models.gguf_names import NameTable
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Attention, Layer, Mlp, Moe
from rooflax.nn.recurrent import GatedDelta

KINDS = ("full_attention", "linear_attention")
KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
TINY: dict[str, Any] = {
    "hidden_size": 56, "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 10, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}  # fmt: skip


def read_mixers(
    reader: ConfigReader, *, kv_heads: int, fused: bool = False
) -> tuple[Attention, GatedDelta]:
    reader.expect("attn_output_gate", True)
    defaults = {"norm_eps": 1e-6, "kv_heads": kv_heads, "head_dim": 256, "partial": 0.25}
    attention = common.read_attention(reader, **defaults, **common.read_biases(reader))
    norm = replace(attention.norm, plus_one=True)
    keys = reader.size("linear_num_key_heads", 16)
    values = reader.size("linear_num_value_heads", 32)
    if values % keys:
        raise CheckpointError(
            f"config.json has linear_num_value_heads = {values} and linear_num_key_heads = {keys}; "
            f"the first must be a multiple of the second."
        )
    key_dim, value_dim = (reader.size(f"linear_{p}_head_dim", 128) for p in ("key", "value"))
    taps = reader.size("linear_conv_kernel_dim", 4, least=2)
    delta = GatedDelta(keys, values // keys, key_dim, value_dim, taps, norm, fused)
    return replace(attention, norm=norm, qk_norm=norm.eps, gate=True), delta


def read_layers(
    reader: ConfigReader, attention: Attention, delta: GatedDelta, mlps: Sequence[Mlp | Moe]
) -> Decoder:
    interval = reader.size("full_attention_interval", 4)
    default = [KINDS[(i + 1) % interval != 0] for i in range(len(mlps))]
    mixers: dict[str, Any] = dict(zip(KINDS, (attention, delta), strict=True))
    kinds = reader.layer_types(len(mlps), default, KINDS)
    layers = (Layer(mixers[kind], mlp) for kind, mlp in zip(kinds, mlps, strict=True))
    return common.read_decoder(reader, layers, max_position=32_768)


def _delta(decoder: Decoder) -> GatedDelta | None:
    return next((x.attention for x in decoder.layers if isinstance(x.attention, GatedDelta)), None)


def write_mixers(decoder: Decoder) -> dict[str, Any]:
    kinds = [isinstance(layer.attention, GatedDelta) for layer in decoder.layers]
    delta, moe = _delta(decoder), decoder.moe
    written: dict[str, Any] = {"layer_types": [KINDS[kind] for kind in kinds]}
    written |= common.rotary_share(decoder)
    written |= {"shared_expert_intermediate_size": moe.shared} if moe else {}
    return written if delta is None else written | {
        "linear_num_key_heads": delta.num_heads,
        "linear_num_value_heads": delta.num_heads * delta.group,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
    }  # fmt: skip


def read_text_part(reader: ConfigReader, model_type: str) -> ConfigReader:
    """text_config; whether embeddings are tied may stand beside it, and must then agree."""
    text = reader.part("text_config")
    text.expect("model_type", model_type)
    if reader.has("tie_word_embeddings"):
        tied = reader.flag("tie_word_embeddings", False)
        text.assume(tie_word_embeddings=tied)
        text.expect("tie_word_embeddings", tied)
    return text


def read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    """The gated delta rule's value heads, its layers, and the count without further ones."""
    reader.waive("rope.dimension_sections")
    stated = reader.count_without(reader.get("nextn_predict_layers", 0), raw)
    inner, heads = reader.get("ssm.inner_size"), raw.get("linear_num_value_heads")
    if type(inner) is int and type(heads) is int and heads > 0:
        stated["linear_value_head_dim"] = inner // heads
    interval = reader.get("full_attention_interval")
    recurrent = reader.per_layer("attention.recurrent_layers")
    if recurrent is not None:
        count = stated["num_hidden_layers"]
        stated["layer_types"] = [KINDS[bool(flag)] for flag in recurrent[:count]]
    elif interval is not None:
        stated["full_attention_interval"] = interval
    return stated | reader.attention(raw)


def write_gguf(decoder: Decoder, raw: Raw) -> Metadata:
    delta = _delta(decoder)
    if delta is None:
        return {}
    if delta.value_dim != delta.key_dim:
        raise UnsupportedModelError(
            f"llama.cpp computes {raw['model_type']} with one size of key and value heads; the "
            f"model has linear_key_head_dim = {delta.key_dim} and linear_value_head_dim = "
            f"{delta.value_dim}."
        )
    kinds = [isinstance(layer.attention, GatedDelta) for layer in decoder.layers]
    inner = delta.num_heads * delta.group * delta.value_dim
    return {"ssm.inner_size": inner, "attention.recurrent_layers": kinds}


def write_image_gguf(decoder: Decoder, raw: Raw) -> Metadata:
    """Writes the common keys, and how many RoPE frequencies are for time, height and width."""
    written = write_gguf(decoder, raw)
    half = (full_rope(decoder).dim or decoder.head_dim) // 2
    sections = {"rope.dimension_sections": [-(-(half - i) // 3) for i in range(3)] + [0]}
    return written | (sections if written else {})


def delta_tensors(decoder: Decoder) -> NameTable:
    """The gated delta rule; Qwen 3.5's files have value heads in an order of their own."""
    delta = _delta(decoder)
    if delta is None:
        return {}
    values = delta.group * delta.value_dim
    if delta.fused:
        kinds = (delta.key_dim, delta.key_dim, values, values)
        order = {"qkvz": HeadKinds(delta.num_heads, kinds)}
        stored = {"qkvz": ("attn_qkv.weight", "attn_gate.weight"), "ba": ("ssm_ba.weight",)}
        heads, kernel, out = KEEP, Kernel(), KEEP
    else:
        size, keys = (delta.num_heads, delta.group), 2 * delta.num_heads * delta.key_dim
        heads, out = Tiled(*size), Tiled(*size, delta.value_dim, is_columns=True)
        rows = Tiled(*size, delta.value_dim, keys)
        order = {"qkv": rows, "z": Tiled(*size, delta.value_dim), "b": heads, "a": heads}
        names = {"qkv": "attn_qkv", "z": "attn_gate", "b": "ssm_beta", "a": "ssm_alpha"}
        stored = {name: (f"{gguf}.weight",) for name, gguf in names.items()}
        kernel = Kernel(rows)
    table = {
        f"in_proj_{name}.weight": (names, order.get(name, KEEP)) for name, names in stored.items()
    } | {
        "conv1d.weight": (("ssm_conv1d.weight",), kernel),
        "A_log": (("ssm_a",), Decay(heads)),
        "dt_bias": (("ssm_dt.bias",), heads),
        "norm.weight": (("ssm_norm.weight",), KEEP),
        "out_proj.weight": (("ssm_out.weight",), out),
    }
    return {
        f"model.layers.{{i}}.linear_attn.{name}": (
            tuple(f"blk.{{i}}.{one}" for one in names), change,
        )
        for name, (names, change) in table.items()
    }  # fmt: skip
