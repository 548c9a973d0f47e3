"""The keys of config.json that LLaMA and its descendants read and write alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.models.config_reader import ConfigReader
from rooflax.models.rope_reader import read_rope
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Attention, Layer, Mlp
from rooflax.nn.rope import Rope
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

Windows = tuple[int | None, ...]
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
"""A name of a tensor is made for each of a layer's."""
MOST_DIMENSIONS = 2**16
"""Dimensions of a head; their order in a checkpoint is listed."""


def tiny(*without: str, **changes: Any) -> dict[str, Any]:
    """config.json of a family's tiny test checkpoint, all of whose sizes differ: a small LLaMA's.

    Args:
        without: keys that the family does not have.
        changes: the family's own.
    """
    raw = {
        "vocab_size": 263, "hidden_size": 54, "intermediate_size": 104, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "max_position_embeddings": 131, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "rope_theta": 1000.0,
    }  # fmt: skip
    return {key: value for key, value in raw.items() if key not in without} | changes


def read_attention(
    reader: ConfigReader,
    *,
    norm_eps: float = 1e-6,
    norm: NormKind | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    theta: float | None = 10_000.0,
    partial: float | None = None,
    **parts: Any,
) -> Attention:
    """Heads, their sizes and RoPE.

    Args:
        norm_eps, kv_heads, head_dim, theta, partial: what the family has where config.json does not
            give them; None is one K/V head for each head, the hidden size over the heads, no
            RoPE, and RoPE of whole heads alone.
        norm: in place of an RMSNorm.
        parts: of `Attention`, what the family has beside them.
    """
    num_heads = reader.size("num_attention_heads")
    hidden_size = reader.size("hidden_size")
    absent = num_heads if reader.has("num_key_value_heads") else kv_heads or num_heads
    num_kv_heads = reader.size("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json has num_attention_heads = {num_heads} and num_key_value_heads = "
            f"{num_kv_heads}; the first must be a multiple of the second."
        )
    if reader.get("head_dim", head_dim) is None and hidden_size % num_heads:
        raise CheckpointError(
            f"config.json has hidden_size = {hidden_size} and num_attention_heads = {num_heads}; "
            f"the first must be a multiple of the second unless head_dim is given."
        )
    head_dim = reader.size("head_dim", head_dim or hidden_size // num_heads, most=MOST_DIMENSIONS)
    if head_dim % 2:
        raise CheckpointError(f"config.json has head_dim = {head_dim}; RoPE needs an even one.")
    norm = norm or NormKind(reader.number("rms_norm_eps", norm_eps))
    if theta is not None:
        parts["rope"] = read_rope(reader, head_dim, theta, partial)
    return Attention(num_heads, num_kv_heads, head_dim, norm, **parts)


def read_biases(reader: ConfigReader, absent: bool = False) -> dict[str, Any]:
    """`attention_bias`, of all four matmuls."""
    bias = reader.flag("attention_bias", absent)
    return {"qkv_bias": bias, "output_bias": bias}


def read_nested_ropes(
    reader: ConfigReader,
    head_dim: int,
    full_theta: float,
    local_theta: float,
    local_dim: int | None = None,
) -> tuple[Rope, Rope] | None:
    """RoPE of layers without a window and with one, if config.json states both apart.

    Args:
        full_theta, local_theta: the family's defaults.
        local_dim: head_dim of layers with a window; None is that of the others.
    """
    kinds = ("full_attention", "sliding_attention")
    nested = reader.get("rope_parameters", None)
    if nested is None:
        return None
    stated = nested if isinstance(nested, dict) else {"": nested}
    if not {key for key, value in stated.items() if value is not None} <= set(kinds):
        raise CheckpointError(
            f"config.json has rope_parameters = {nested!r:.80}; they must be an object of "
            f"{' and '.join(kinds)}."
        )
    length = {"max_position_embeddings": reader.get("max_position_embeddings", None)}
    full, local = (
        reader.inner(f"rope_parameters.{kind}", {"rope_parameters": nested.get(kind)} | length)
        for kind in kinds
    )
    local_rope = read_rope(local, local_dim or head_dim, local_theta)
    return read_rope(full, head_dim, full_theta), local_rope


def read_kinds_ropes(
    reader: ConfigReader, head_dim: int, full_theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """RoPE of layers without a window and with one; one stated for both is of the former alone."""
    top = reader.number("rope_theta", full_theta)
    nested = read_nested_ropes(reader, head_dim, top, local_theta)
    if nested is not None:
        return nested
    stated = reader.get("rope_scaling", None)
    if isinstance(stated, dict) and "type" in stated and "rope_type" not in stated:
        raise UnsupportedModelError(
            f"config.json has rope_scaling.type = {stated['type']!r:.80} and no rope_type, which "
            f"transformers passes over for {reader.model_type}; name it rope_type."
        )
    return read_rope(reader, head_dim, full_theta), Rope(local_theta)


def nested_ropes(decoder: Decoder) -> dict[str, Any]:
    """`rope_parameters` that state RoPE of layers without a window and with one apart."""
    kinds = zip(layer_types(windows_of(decoder)), decoder.layers, strict=True)
    ropes = {kind: layer.attention.rope for kind, layer in kinds}
    return {kind: rope.to_hf() for kind, rope in ropes.items() if rope is not None}


def read_mlp(
    reader: ConfigReader, norm: NormKind, absent: int | None = None, *, bias: bool = False
) -> Mlp:
    """A gated feed-forward network; `absent` is the family's width."""
    width = reader.size("intermediate_size", *([absent] if absent else []))
    return Mlp(width, norm, reader.choice("hidden_act", tuple(ACTIVATIONS), "silu"), bias=bias)


def read_experts(reader: ConfigReader, key: str, absent: int, chosen: int) -> tuple[int, int]:
    """Number of experts, and of those per token.

    Args:
        key: of the first.
        absent, chosen: the family's defaults.
    """
    count = reader.size(key, absent, most=MOST_EXPERTS)
    chosen = reader.size("num_experts_per_tok", chosen)
    if chosen > count:
        raise CheckpointError(
            f"config.json has num_experts_per_tok = {chosen} of {key} = {count}; the first must "
            f"not be larger."
        )
    return count, chosen


def read_dense(
    reader: ConfigReader,
    attention: Attention,
    *,
    max_position: int,
    tied_embeddings: bool = False,
    windows: Windows | None = None,
    mlp_bias: bool = False,
) -> Decoder:
    """Layers that differ in their windows at most, with dense networks of attention's wiring.

    Args:
        max_position, tied_embeddings: the family's defaults.
    """
    mlp = replace(read_mlp(reader, attention.norm, bias=mlp_bias), wiring=attention.wiring)
    windows = windows or (attention.window,) * num_layers(reader)
    layers = (Layer(replace(attention, window=window), mlp) for window in windows)
    return read_decoder(reader, layers, max_position=max_position, tied_embeddings=tied_embeddings)


def num_layers(reader: ConfigReader) -> int:
    return reader.size("num_hidden_layers", most=MOST_LAYERS)


def read_decoder(
    reader: ConfigReader,
    layers: Iterable[Layer],
    *,
    max_position: int,
    tied_embeddings: bool = False,
) -> Decoder:
    """Layers and the ends.

    Args:
        max_position, tied_embeddings: the family's defaults.
    """
    layers = tuple(layers)
    return Decoder(
        reader.size("vocab_size"),
        reader.size("hidden_size"),
        reader.size("max_position_embeddings", max_position),
        layers,
        layers[0].attention.norm,
        reader.flag("tie_word_embeddings", tied_embeddings),
    )


def write_decoder(decoder: Decoder, model_type: str, architecture: str) -> dict[str, Any]:
    """config.json of what `read_decoder` gives, without what a family has beside it."""
    attention, mlp = decoder.attention, decoder.layers[0].mlp
    rope = decoder.ropes[0] if decoder.ropes else Rope(10_000.0)
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": mlp.width,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": decoder.max_position,
        "rms_norm_eps": attention.norm.eps,
        "hidden_act": mlp.activation if isinstance(mlp.activation, str) else "silu",
        "tie_word_embeddings": decoder.tied_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling.to_hf() if rope.scaling else None,
    } | (rotary_share(decoder) if rope.dim else {})


def rotary_share(decoder: Decoder) -> dict[str, float]:
    """Share of a head that RoPE rotates, also if that is all of it."""
    rope = decoder.ropes[0] if decoder.ropes else Rope(10_000.0)
    return {"partial_rotary_factor": (rope.dim or decoder.head_dim) / decoder.head_dim}


def windows_of(decoder: Decoder) -> Windows:
    return tuple(layer.attention.window for layer in decoder.layers)


def read_kinds(reader: ConfigReader, full: Layer, local: Layer, period: int) -> list[Layer]:
    """Layers without a window and with one, by `layer_types`; else each `period`-th has none."""
    count = num_layers(reader)
    default = layer_types(tuple(1 if (i + 1) % period else None for i in range(count)))
    kinds = {"full_attention": full, "sliding_attention": local}
    return [kinds[kind] for kind in windowed_types(reader, default)]


def windowed_types(reader: ConfigReader, default: Sequence[str]) -> list[str]:
    """`layer_types` of a family whose layers with a window need its size."""
    types = reader.layer_types(len(default), default)
    if "sliding_attention" in types and reader.is_null("sliding_window"):
        raise CheckpointError(
            "config.json has sliding_window = null and layers of type sliding_attention; such "
            "layers need a number."
        )
    return types


def write_kinds(decoder: Decoder) -> dict[str, Any]:
    windows = windows_of(decoder)
    window = next((window for window in windows if window), 4096)
    return {"sliding_window": window, "layer_types": layer_types(windows)}


def write_nested(decoder: Decoder, model_type: str, architecture: str) -> dict[str, Any]:
    """config.json of layers without a window and with one, whose RoPEs differ."""
    written = write_decoder(decoder, model_type, architecture)
    del written["rope_theta"], written["rope_scaling"]
    biases = {"attention_bias": decoder.layers[0].attention.qkv_bias}
    return written | biases | write_kinds(decoder) | {"rope_parameters": nested_ropes(decoder)}


def layer_types(windows: Windows) -> list[str]:
    """As config.json names layers with a window and without."""
    return ["sliding_attention" if window else "full_attention" for window in windows]
