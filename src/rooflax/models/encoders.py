"""Parts of all encoders: bidirectional attention, a norm of each sum, BERT's keys and names.

Their forward pass is the decoders' own (`nn.decoder`), with other options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf_names import NameTable, renamed
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Layer, Mlp
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import OUTER, NormKind
from rooflax.ops.activation import ACTIVATIONS

BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12,
}  # fmt: skip
"""Sizes that config.json may leave out, as transformers has them."""
WAIVED = (
    "sentence_transformers", "sbert_ce_default_activation_function", "directionality", "pooler_*",
    "cls_token_id", "mask_token_id", "type_vocab_size",
)  # fmt: skip
"""Keys of heads and tokenizers; `type_vocab_size` of families that read no token types."""
GGUF_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "vocab_size": "vocab_size",
}
"""Metadata of GGUF files that all encoders have."""
GGUF_NAMES = {
    "embed": "token_embd", "position": "position_embd", "token_type": "token_types",
    "embed_norm": "token_embd_norm", "final_norm": "output_norm", "attn.norm": "attn_norm",
    "attn.o": "attn_output", "attn.post_norm": "attn_output_norm", "mlp.norm": "ffn_norm",
    "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp.post_norm": "layer_output_norm",
}  # fmt: skip
"""By the table's key, llama.cpp's name."""


@dataclass(frozen=True)
class ScoreHead:
    """Layers from a text's vector to its score, of checkpoints for sequence classification.

    Attributes:
        layers: of each its tensors' name and the activation behind it.
        norm: the name of a LayerNorm behind the first one.
        pooling: a kind of `nn.pooler`.
        activation_key, pooling_key: of config.json, where that says the first layer's activation,
            and the pooling.
    """

    layers: tuple[tuple[str, str], ...]
    norm: str | None = None
    pooling: str = "first"
    activation_key: str | None = None
    pooling_key: str | None = None


TANH_HEAD = ScoreHead((("classifier.dense", "Tanh"), ("classifier.out_proj", "Identity")))
"""RoBERTa's, and of those who took it over."""


def bert_names(
    prefix: str, layer: str = "encoder.layer.{i}", **others: str | tuple[str, ...]
) -> TensorNames:
    """Names of weights and biases in checkpoints.

    Args:
        others: names other than BERT's, by the table's key with "__" for a dot; a layer's within
            it.
    """
    top = {
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "token_type": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
    }
    within_layer = {
        "attn.qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
        "attn.o": "attention.output.dense",
        "attn.post_norm": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "mlp.post_norm": "output.LayerNorm",
    }
    changed = {key.replace("__", "."): name for key, name in others.items()}
    within = within_layer | {k: v for k, v in changed.items() if "." in k}
    places = {key: prefix + name for key, name in (top | _without_dots(changed)).items()}
    places |= {f"layers.{{i}}.{key}": _below(prefix + layer, name) for key, name in within.items()}
    stored = []
    for key, name in places.items():
        for ending, end in (("", "weight"), ("_bias", "bias")):
            stored.append((key + ending, StoredAs(_ended(name, end))))
    return TensorNames(tuple(stored))


def _without_dots(names: Mapping[str, Any]) -> dict[str, Any]:
    return {key: name for key, name in names.items() if "." not in key}


def _below(layer: str, name: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(name, str):
        return f"{layer}.{name}"
    return tuple(f"{layer}.{each}" for each in name)


def _ended(name: str | tuple[str, ...], end: str) -> str | tuple[str, ...]:
    return f"{name}.{end}" if isinstance(name, str) else tuple(f"{each}.{end}" for each in name)


def gguf_tensors(names: TensorNames) -> NameTable:
    """GGUF names of an encoder's tensors.

    Args:
        names: those of its checkpoints, of `bert_names`.
    """
    pairs: list[tuple[str, str]] = []
    for key, place in names.stored:
        if not key.endswith("_bias"):
            hf = (place.hf,) if isinstance(place.hf, str) else place.hf
            prefix = "blk.{i}." if key.startswith("layers.") else ""
            parts = _gguf_parts(key.removeprefix("layers.{i}."), len(hf))
            pairs += zip(hf, (prefix + part for part in parts), strict=False)
    return renamed(*((hf.removesuffix(".weight"), stored) for hf, stored in pairs))


def _gguf_parts(place: str, count: int) -> tuple[str, ...]:
    """Names of a weight's tensors; of `count` that a checkpoint has."""
    fused = {
        ("attn.qkv", 3): ("attn_q", "attn_k", "attn_v"), ("attn.qkv", 1): ("attn_qkv",),
        ("mlp.gate_up", 2): ("ffn_gate", "ffn_up"), ("mlp.gate_up", 1): ("ffn_up",),
    }  # fmt: skip
    return fused.get((place, count)) or ((GGUF_NAMES[place],) if place in GGUF_NAMES else ())


def read_encoder(
    reader: ConfigReader,
    names: TensorNames,
    *,
    defaults: Mapping[str, Any] = BASE,
    act: str = "hidden_act",
    eps: float = 1e-12,
    max_position: int = 512,
    first_position: int = 0,
    token_types: int = 0,
    theta: float | None = None,
    gated: bool = False,
    bias: bool = True,
) -> Decoder:
    """Layers that are alike, each with a norm behind attention and one behind the network.

    Args:
        act: the key of the activation.
        max_position, eps: the family's defaults.
        first_position: rows of the table of positions that no token reads.
        token_types: the family's default; 0 is none at all.
        theta: the default of RoPE, in place of learned positions.
    """
    reader.assume(**defaults)
    reader.waive(*WAIVED, "tie_word_embeddings")
    reader.expect("position_embedding_type", "absolute")
    norm = NormKind(reader.number("layer_norm_eps", eps), bias=True, centered=True)
    parts: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias, "causal": False}
    attention = common.read_attention(reader, norm=norm, theta=theta, wiring=OUTER, **parts)
    activation = reader.choice(act, tuple(ACTIVATIONS), "silu" if gated else "gelu")
    width = reader.size("intermediate_size")
    mlp = Mlp(width, norm, activation, gated=gated, bias=bias, wiring=OUTER)
    rows = reader.size("max_position_embeddings", max_position)
    if rows <= first_position:
        raise CheckpointError(
            f"config.json has max_position_embeddings = {rows}, of which the first "
            f"{first_position} are no token's."
        )
    types = reader.size("type_vocab_size", token_types) if token_types else 0
    return Decoder(
        reader.size("vocab_size"),
        reader.size("hidden_size"),
        rows - first_position,
        (Layer(attention, mlp),) * common.num_layers(reader),
        norm,
        has_head=False,
        learned_positions=theta is None,
        first_position=first_position,
        token_types=types,
        embed_norm=norm,
        final_norm=False,
        names=names,
    )


def write_encoder(decoder: Decoder, model_type: str, architecture: str) -> dict[str, Any]:
    """config.json of what `read_encoder` gives."""
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, Mlp)
    written = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "max_position_embeddings": decoder.first_position + decoder.max_position,
        "layer_norm_eps": decoder.norm.eps,
        "hidden_act": layer.mlp.activation,
    }
    if decoder.token_types:
        written["type_vocab_size"] = decoder.token_types
    return written
