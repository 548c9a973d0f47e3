"""Gemma 3's text model: norms around each branch, five layers with a window to one without.

Layers with a window have a RoPE of their own. EmbeddingGemma attends both ways, in windows of half
the size. The file is longer than others, since it describes both. Rejected: soft-caps.

Source: transformers, models/gemma3/modeling_gemma3.py; Gemma Team, Gemma 3 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, MetadataReader, Raw, write_local_theta
from rooflax.models.gguf_names import COMMON, POST_NORM, WINDOW
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp
from rooflax.nn.wiring import SANDWICH
from rooflax.ops.activation import ACTIVATIONS

DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
"""Values that files leave out where they are transformers' defaults."""
TINY = common.tiny(
    "hidden_act", num_hidden_layers=4, tie_word_embeddings=True, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=28, sliding_window=7,
    sliding_window_pattern=3, rope_local_base_freq=100.0,
    rope_scaling={"rope_type": "linear", "factor": 4.0},
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    reader.expect("attn_logit_softcapping", None)
    reader.expect("final_logit_softcapping", None)
    causal = not reader.flag("use_bidirectional_attention", False)
    parts = common.read_biases(reader) | {"wiring": SANDWICH, "theta": None, "causal": causal}
    attention = common.read_attention(reader, norm_eps=1e-6, **parts)
    norm = replace(attention.norm, plus_one=True)
    scale = reader.number("query_pre_attn_scalar", 256)
    attention = replace(attention, norm=norm, qk_norm=norm.eps, scale=scale**-0.5)
    activation = reader.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    mlp = Mlp(reader.size("intermediate_size"), norm, activation, wiring=SANDWICH)
    thetas = 1e6, reader.number("rope_local_base_freq", 1e4)
    full, local = common.read_kinds_ropes(reader, attention.head_dim, *thetas)
    attention = replace(attention, rope=full)
    window = reader.size("sliding_window", 4096, least=int(causal))
    window = window if causal else window // 2 + 1  # to each side, the token itself included
    windowed = replace(attention, rope=local, window=window)
    period = reader.size("sliding_window_pattern", 6)
    layers = common.read_kinds(reader, Layer(attention, mlp), Layer(windowed, mlp), period)
    decoder = common.read_decoder(reader, layers, max_position=131_072, tied_embeddings=True)
    return replace(decoder, embed_scale=decoder.hidden_size**0.5)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_nested(decoder, "gemma3_text", "Gemma3ForCausalLM")
    if not attention.causal:
        written["sliding_window"] = 2 * (written["sliding_window"] - 1)
    return written | {
        "use_bidirectional_attention": not attention.causal,
        "hidden_activation": written.pop("hidden_act"),
        "query_pre_attn_scalar": (attention.scale or 1.0) ** -2,
    }


def _read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    """The scale of queries, which is not in the metadata; llama.cpp knows the 27B model by its 62
    layers. Without a size no layer has a window."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    stated: Raw = {"query_pre_attn_scalar": raw.get("head_dim", 256)}
    if raw.get("num_hidden_layers") == 62 and heads and isinstance(hidden, int):
        stated["query_pre_attn_scalar"] = hidden // heads
    if reader.both_ways:
        reader.check_dense()
    elif not raw.get("sliding_window"):
        stated["layer_types"] = ["full_attention"] * raw.get("num_hidden_layers", 0)
    return stated | reader.attention(raw)


GGUF = GGUFSpec(
    "gemma3", both_ways="gemma-embedding", biases={},
    keys=COMMON | WINDOW | {"rope.freq_base_swa": "rope_local_base_freq"},
    read=_read_gguf, write=write_local_theta,
    tensors=POST_NORM, adds_one=True,
)  # fmt: skip
