"""Gemma 3's text model: norms around each branch, five layers with a window to one without.

Layers with a window have a RoPE of their own, which scaling leaves alone. Rejected: soft-caps and
bidirectional attention.

Source: transformers, models/gemma3/modeling_gemma3.py; Gemma Team, Gemma 3 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp
from rooflax.nn.rope import Rope
from rooflax.nn.wiring import SANDWICH
from rooflax.ops.activation import ACTIVATIONS

DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
"""What files leave out where it is transformers' default."""


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.expect(key, None)
    reader.expect("use_bidirectional_attention", False)
    parts = common.read_biases(reader) | {"wiring": SANDWICH, "theta": None}
    attention = common.read_attention(reader, norm_eps=1e-6, **parts)
    norm = replace(attention.norm, plus_one=True)
    scale = reader.number("query_pre_attn_scalar", 256) ** -0.5
    attention = replace(attention, norm=norm, qk_norm=norm.eps, scale=scale)
    activation = reader.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    mlp = Mlp(reader.size("intermediate_size"), norm, activation, wiring=SANDWICH)
    full, local = _read_ropes(reader, attention.head_dim)
    window = reader.size("sliding_window", 4096)
    kinds = {
        "full_attention": Layer(replace(attention, rope=full), mlp),
        "sliding_attention": Layer(replace(attention, rope=local, window=window), mlp),
    }
    layers = [kinds[kind] for kind in _read_kinds(reader)]
    decoder = common.read_decoder(reader, layers, max_position=131_072, tied_embeddings=True)
    return replace(decoder, embed_scale=decoder.hidden_size**0.5)


def _read_kinds(reader: ConfigReader) -> list[str]:
    count, period = common.num_layers(reader), reader.size("sliding_window_pattern", 6)
    full = [(i + 1) % period == 0 for i in range(count)]
    return reader.layer_types(count, common.layer_types(tuple(None if f else 1 for f in full)))


def _read_ropes(reader: ConfigReader, head_dim: int) -> tuple[Rope, Rope]:
    """Of layers without a window and with one."""
    if nested := common.read_nested_ropes(reader, head_dim, 1_000_000.0, 10_000.0):
        return nested
    full = common.read_rope(reader, head_dim, 1_000_000.0)
    return full, Rope(reader.number("rope_local_base_freq", 10_000.0))


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention, windows = decoder.layers[0].attention, common.windows_of(decoder)
    written = common.write_decoder(decoder, "gemma3_text", "Gemma3ForCausalLM")
    del written["rope_theta"], written["rope_scaling"]
    return written | {
        "hidden_activation": written.pop("hidden_act"),
        "query_pre_attn_scalar": (attention.scale or 1.0) ** -2,
        "attention_bias": attention.qkv_bias,
        "sliding_window": next((window for window in windows if window), 4096),
        "layer_types": common.layer_types(windows),
        "rope_parameters": common.nested_ropes(decoder),
    }
