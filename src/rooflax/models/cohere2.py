"""Command R7B and Command A (Cohere 2): attention and network side by side behind one LayerNorm.

Three of four layers have a window and RoPE of neighbouring dimensions, the others neither.
Rejected: q/k norms, other wirings.

Source: transformers, models/cohere2/modeling_cohere2.py; Cohere, Command A, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, WINDOW
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer
from rooflax.nn.wiring import NormKind, Wiring

STATED = {
    "use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False,
    "use_embedding_sharing": True, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip
"""Keys of files that transformers does not read, and what it computes."""
GGUF = GGUFSpec(
    "cohere2", square=True, tied=True, required=("logit_scale", "attention.sliding_window"),
    keys=COMMON | {"attention.layer_norm_epsilon": "layer_norm_eps"} | WINDOW
    | {"logit_scale": "logit_scale"},
)  # fmt: skip
TINY = common.tiny(
    "head_dim", "rms_norm_eps", sliding_window=7, num_hidden_layers=4, hidden_size=60,
    layer_norm_eps=1e-5, tie_word_embeddings=True, logit_scale=0.5,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("use_parallel_embedding")  # how the embedding was sharded in training
    for key, only in STATED.items():
        reader.expect(key, only)
    reader.expect("head_dim", reader.size("hidden_size") // reader.size("num_attention_heads"))
    norm = NormKind(reader.number("layer_norm_eps", 1e-5), centered=True)
    biases = common.read_biases(reader)
    attention = common.read_attention(reader, norm=norm, interleaved=True, **biases)
    mlp = replace(common.read_mlp(reader, norm), wiring=Wiring(before=False))
    window = reader.size("sliding_window", 4096)
    full = Layer(replace(attention, rope=None), mlp, parallel=True)
    local = Layer(replace(attention, window=window), mlp, parallel=True)
    period = reader.size("sliding_window_pattern", 4)
    reader.expect("layer_switch", period)
    layers = common.read_kinds(reader, full, local, period)
    decoder = common.read_decoder(reader, layers, max_position=8192, tied_embeddings=True)
    return replace(decoder, logit_scale=reader.number("logit_scale", 0.0625))


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "cohere2", "Cohere2ForCausalLM")
    return written | {
        "layer_norm_eps": written.pop("rms_norm_eps"),
        "attention_bias": decoder.layers[0].attention.qkv_bias,
        "logit_scale": decoder.logit_scale,
    } | common.write_kinds(decoder)  # fmt: skip
