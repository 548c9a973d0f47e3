"""Gemma 2: norms around each branch, a window in every other layer, capped scores and logits.

Rejected: attention both ways.

Source: transformers, models/gemma2/modeling_gemma2.py; Gemma Team, Gemma 2, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, MetadataReader, Raw
from rooflax.models.gguf_names import COMMON, POST_NORM, WINDOW
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp
from rooflax.nn.wiring import SANDWICH
from rooflax.ops.activation import ACTIVATIONS

DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
"""Values that files leave out where they are transformers' defaults."""
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
TINY = common.tiny(
    "hidden_act", num_hidden_layers=4, tie_word_embeddings=True, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=28, sliding_window=7,
    attn_logit_softcapping=5.0, final_logit_softcapping=20.0,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    reader.expect("use_bidirectional_attention", False, None)
    biases = common.read_biases(reader)
    attention = common.read_attention(reader, norm_eps=1e-6, wiring=SANDWICH, **biases)
    norm = replace(attention.norm, plus_one=True)
    scale = reader.number("query_pre_attn_scalar", 256) ** -0.5
    cap = _cap(reader, SCORE_CAP, 50.0)
    full = replace(attention, norm=norm, scale=scale, score_cap=cap)
    local = replace(full, window=reader.size("sliding_window", 4096))
    activation = reader.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    reader.expect("hidden_act", None, activation)
    mlp = Mlp(reader.size("intermediate_size"), norm, activation, wiring=SANDWICH)
    layers = common.read_kinds(reader, Layer(full, mlp), Layer(local, mlp), period=2)
    decoder = common.read_decoder(reader, layers, max_position=8192, tied_embeddings=True)
    cap = _cap(reader, LOGIT_CAP, 30.0)
    return replace(decoder, embed_scale=decoder.hidden_size**0.5, logit_cap=cap)


def _cap(reader: ConfigReader, key: str, absent: float) -> float | None:
    return None if reader.is_null(key) else reader.number(key, absent)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "gemma2", "Gemma2ForCausalLM")
    return written | common.write_kinds(decoder) | {
        "attention_bias": attention.qkv_bias,
        "hidden_activation": written.pop("hidden_act"),
        "query_pre_attn_scalar": (attention.scale or 1.0) ** -2,
        SCORE_CAP: attention.score_cap,
        LOGIT_CAP: decoder.logit_cap,
    }  # fmt: skip


def _read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    """The scale of queries, which is not in the metadata; llama.cpp knows the 27B model by its 46
    layers."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    scale = raw.get("head_dim", 256)
    if raw.get("num_hidden_layers") == 46 and heads and isinstance(hidden, int):
        scale = hidden // heads
    return {"query_pre_attn_scalar": scale} | reader.attention(raw)


def _lacks(decoder: Decoder) -> str | None:
    """Scales and windows that llama.cpp does not compute."""
    attention, layers = decoder.layers[0].attention, decoder.num_layers
    heads = decoder.hidden_size // attention.num_heads if layers == 46 else attention.head_dim
    if attention.scale != heads**-0.5:
        return "whose query_pre_attn_scalar is not a head's size"
    local = [bool(window) for window in common.windows_of(decoder)]
    if local != [i % 2 == 0 for i in range(layers)]:
        return "whose layers with a window are not the first of each two"
    return None


GGUF = GGUFSpec(
    "gemma2", biases={}, adds_one=True, tensors=POST_NORM, read=_read_gguf, lacks=_lacks,
    keys=COMMON | WINDOW
    | {"attn_logit_softcapping": SCORE_CAP, "final_logit_softcapping": LOGIT_CAP},
)  # fmt: skip
