"""GPT-2: LayerNorm, learned positions, fused c_attn, a two-layer MLP, biases everywhere.

The file is longer than others, since no key and no tensor is named as LLaMA's. Rejected: cross
attention, attention scaled by layer index, unscaled attention.

Source: transformers, models/gpt2/modeling_gpt2.py; Radford et al., 2019.
"""

from __future__ import annotations

from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_changes import Transposed
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Attention, Layer, Mlp
from rooflax.nn.tensor_layouts import Conv1D, Flat, Swapped, TensorLayout
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

HF_PREFIXES = ("transformer.", "")
"""Checkpoints name their tensors with this prefix, or without."""


def _pair(
    key: str, hf: str, weight: TensorLayout | None = None, bias: TensorLayout | None = None
) -> tuple:
    """A weight and its bias."""
    hf = f"transformer.{hf}"
    return (key, StoredAs(f"{hf}.weight", weight)), (f"{key}_bias", StoredAs(f"{hf}.bias", bias))


NAMES = TensorNames(
    (
        ("embed", StoredAs("transformer.wte.weight")),
        ("position", StoredAs("transformer.wpe.weight")),
        *_pair("final_norm", "ln_f"),
        *_pair("layers.{i}.attn.norm", "h.{i}.ln_1"),
        *_pair("layers.{i}.attn.qkv", "h.{i}.attn.c_attn", Swapped(3), Swapped(3)),
        *_pair("layers.{i}.attn.o", "h.{i}.attn.c_proj", Conv1D(), Flat()),
        *_pair("layers.{i}.mlp.norm", "h.{i}.ln_2"),
        *_pair("layers.{i}.mlp.up", "h.{i}.mlp.c_fc", Conv1D(), Flat()),
        *_pair("layers.{i}.mlp.down", "h.{i}.mlp.c_proj", Conv1D(), Flat()),
    )
)
PRODUCTS = {
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
_H = "transformer.h.{i}"
GGUF = GGUFSpec(
    "gpt2", biases={}, output_bias=True, mlp_bias=True, read=lambda reader, raw: {},
    keys={
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "vocab_size": "vocab_size",
    },
    tensors={f"{_H}.{hf}.weight": ((f"blk.{{i}}.{stored}.weight",), Transposed())
       for hf, stored in PRODUCTS.items()},
)  # fmt: skip
TINY = {
    "vocab_size": 263, "n_positions": 131, "n_embd": 44, "n_inner": 104, "n_layer": 3, "n_head": 4,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    hidden_size, num_heads = reader.size("n_embd", 768), reader.size("n_head", 12)
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json has n_embd = {hidden_size} and n_head = {num_heads}; "
            f"the first must be a multiple of the second."
        )
    norm = NormKind(reader.number("layer_norm_epsilon", 1e-5), centered=True, bias=True)
    attention = Attention(
        num_heads, num_heads, hidden_size // num_heads, norm, qkv_bias=True, output_bias=True
    )
    activation = reader.choice("activation_function", tuple(ACTIVATIONS), "gelu_new")
    width = reader.size("n_inner", 4 * hidden_size)
    layer = Layer(attention, Mlp(width, norm, activation, gated=False, bias=True))
    return Decoder(
        reader.size("vocab_size"),
        hidden_size,
        reader.size("n_positions", 1024),
        (layer,) * reader.size("n_layer", 12, most=10_000),
        norm,
        reader.flag("tie_word_embeddings", True),
        learned_positions=True,
        names=NAMES,
    )


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": decoder.vocab_size,
        "n_embd": decoder.hidden_size,
        "n_inner": mlp.width,
        "n_layer": decoder.num_layers,
        "n_head": decoder.num_heads,
        "n_positions": decoder.max_position,
        "layer_norm_epsilon": decoder.norm.eps,
        "activation_function": mlp.activation,
        "tie_word_embeddings": decoder.tied_embeddings,
    }
