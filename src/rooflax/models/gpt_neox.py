"""GPT-NeoX and Pythia: attention and network side by side, each behind a LayerNorm of its own.

RoPE turns a part of each head; q, k and v of a head lie together. No tensor is named as LLaMA's.

Source: transformers, models/gpt_neox/modeling_gpt_neox.py; Black et al., GPT-NeoX-20B, 2022;
Biderman et al., Pythia, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Attention, Layer, Mlp
from rooflax.nn.rope import Rope
from rooflax.nn.tensor_layouts import QKV, Rows, Shape, TensorLayout
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

HF_PREFIXES = ("gpt_neox.", "")
SKIPPED = r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
"""Buffers that old checkpoints have."""
TINY = common.tiny(
    "head_dim", "rms_norm_eps", "num_key_value_heads", "rope_theta", hidden_size=60,
    layer_norm_eps=1e-5, hidden_act="gelu", rotary_pct=0.4, rotary_emb_base=1000.0,
    attention_bias=True, use_parallel_residual=True,
)  # fmt: skip


@dataclass(frozen=True)
class FusedHeads(Rows):
    """One tensor in which q, k and v of a head follow one another, head after head."""

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        heads = array.shape[-3]
        parts = self.each.split(array, in_shape)
        stacked = np.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], axis=1)
        return [stacked.reshape(-1, *parts[0].shape[1:])]

    def _apart(self, parts: Sequence[np.ndarray], shape: Shape) -> Sequence[np.ndarray]:
        if len(parts) > 1:
            return parts
        (whole,) = parts
        heads = whole.reshape(-1, 3, shape[-1], *whole.shape[1:])
        return [heads[:, i].reshape(-1, *whole.shape[1:]) for i in range(3)]


def _names(attention: Attention) -> TensorNames:
    """Checkpoints' names of the weights."""
    rope = attention.rope or Rope(1.0)
    fused = QKV(order=rope.order(attention.head_dim, interleaved=False))

    def pair(key: str, hf: str, layout: QKV | None = None) -> tuple:
        """A weight and its bias."""
        layouts: list[TensorLayout | None] = [None, None]
        if layout:
            layouts = [FusedHeads(layout), FusedHeads(replace(layout, bias=True))]
        stored = zip(("weight", "bias"), layouts, strict=True)
        weight, bias = (StoredAs(f"gpt_neox.{hf}.{end}", layout) for end, layout in stored)
        return (key, weight), (f"{key}_bias", bias)

    layer = "layers.{i}"
    return TensorNames(
        (
            ("embed", StoredAs("gpt_neox.embed_in.weight")),
            ("lm_head", StoredAs("embed_out.weight")),
            *pair("final_norm", "final_layer_norm"),
            *pair(f"{layer}.attn.norm", f"{layer}.input_layernorm"),
            *pair(f"{layer}.attn.qkv", f"{layer}.attention.query_key_value", fused),
            *pair(f"{layer}.attn.o", f"{layer}.attention.dense"),
            *pair(f"{layer}.mlp.norm", f"{layer}.post_attention_layernorm"),
            *pair(f"{layer}.mlp.up", f"{layer}.mlp.dense_h_to_4h"),
            *pair(f"{layer}.mlp.down", f"{layer}.mlp.dense_4h_to_h"),
        )
    )


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.rename({"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    reader.assume(partial_rotary_factor=0.25)
    heads, hidden = reader.size("num_attention_heads", 64), reader.size("hidden_size", 6144)
    reader.expect("num_key_value_heads", heads)
    reader.expect("head_dim", hidden // heads)
    norm = NormKind(reader.number("layer_norm_eps", 1e-5), centered=True, bias=True)
    biases = common.read_biases(reader, absent=True)
    attention = common.read_attention(reader, norm=norm, partial=0.25, **biases)
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "gelu")
    width = reader.size("intermediate_size", 24_576)
    mlp = Mlp(width, norm, activation, gated=False, bias=True)
    layer = Layer(attention, mlp, parallel=reader.flag("use_parallel_residual", True))
    layers = (layer,) * common.num_layers(reader)
    decoder = common.read_decoder(reader, layers, max_position=2048)
    return replace(decoder, names=_names(attention))


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    layer = decoder.layers[0]
    written = common.write_decoder(decoder, "gpt_neox", "GPTNeoXForCausalLM")
    for key in ("num_key_value_heads", "head_dim", "partial_rotary_factor"):
        written.pop(key, None)
    return written | {
        "layer_norm_eps": written.pop("rms_norm_eps"),
        "attention_bias": layer.attention.qkv_bias,
        "use_parallel_residual": layer.parallel,
        "rotary_emb_base": written.pop("rope_theta"),
        "rotary_pct": common.rotary_share(decoder)["partial_rotary_factor"],
    }
