"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: LLaMA with fused q, k, v and gate, up, and longrope.

longrope has two sets of frequencies. transformers takes the long ones once a text is longer than
the original context, and then computes its keys anew; here `max_model_len` decides, once.
Rejected: other scalings of RoPE.

Source: transformers, models/phi3/modeling_phi3.py; Abdin et al., Phi-3 Technical Report, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import UnsupportedModelError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, WINDOW
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import ATTENTION, MLP
from rooflax.nn.weights import StoredAs

GATE_UP = "layers.{i}.mlp.gate_up", StoredAs(f"{MLP}.gate_up_proj.weight")
NAMES = TensorNames((("layers.{i}.attn.qkv", StoredAs(f"{ATTENTION}.qkv_proj.weight")), GATE_UP))
NO_BIASES = (("attention_bias", False), ("mlp_bias", False), ("lm_head_bias", False))
"""Files say so; transformers has none, whatever they say."""
ORIGINAL = "original_max_position_embeddings"
GGUF = GGUFSpec(
    "phi3", keys=COMMON | WINDOW | {"rope.scaling.original_context_length": ORIGINAL}, biases={},
    partial=True, square=True, ignores_window=True,
)  # fmt: skip
TINY = common.tiny("head_dim", hidden_size=60, pad_token_id=0, sliding_window=7)


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(original_max_position_embeddings=4096)
    for key, only in (*NO_BIASES, ("full_attn_mod", 1), ("interpolate_factor", 1)):
        reader.expect(key, only)
    window = reader.size("sliding_window", 0, least=0) or None
    attention = common.read_attention(reader, norm_eps=1e-5, partial=1.0, window=window)
    reader.size("original_max_position_embeddings")
    scaling = attention.rope.scaling if attention.rope else None
    if scaling and scaling.kind != "longrope":
        raise UnsupportedModelError(
            f"config.json asks for RoPE scaling of type {scaling.kind!r}, which rooflax does not "
            f"compute for phi3 (only default and longrope)."
        )
    return replace(common.read_dense(reader, attention, max_position=4096), names=NAMES)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    scaling = attention.rope.scaling if attention.rope else None
    original = scaling.original_max_position if scaling else decoder.max_position
    return common.write_decoder(decoder, "phi3", "Phi3ForCausalLM") | {
        "sliding_window": attention.window,
        "original_max_position_embeddings": original,
    }
