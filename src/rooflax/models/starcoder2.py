"""StarCoder 2: LLaMA with LayerNorm, biases everywhere, and a network of two layers without a gate.

Source: transformers, models/starcoder2/modeling_starcoder2.py; Lozhkov et al., StarCoder 2 and The
Stack v2, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import MLP, Layer, Mlp
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

NAMES = TensorNames(
    tuple(
        (f"layers.{{i}}.mlp.{ours}{kind}", StoredAs(f"{MLP}.{hf}.{end}"))
        for ours, hf in (("up", "c_fc"), ("down", "c_proj"))
        for kind, end in (("", "weight"), ("_bias", "bias"))
    )
)
GGUF = GGUFSpec(
    "starcoder2", keys=COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"},
    biases={"use_bias": "attn_q"}, square=True, output_bias=True, mlp_bias=True,
    lacks=lambda decoder: "with a window" if decoder.layers[0].attention.window else None,
)  # fmt: skip
TINY = common.tiny(
    "head_dim", "rms_norm_eps", hidden_size=60, norm_epsilon=1e-5, sliding_window=7, use_bias=True,
    hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.expect("head_dim", reader.size("hidden_size") // reader.size("num_attention_heads"))
    norm = NormKind(reader.number("norm_epsilon", 1e-5), centered=True, bias=True)
    bias = reader.flag("use_bias", True)
    window = reader.size("sliding_window", 0, least=0) or None
    parts = {"kv_heads": 2, "qkv_bias": bias, "output_bias": bias, "window": window}
    attention = common.read_attention(reader, norm=norm, **parts)
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    width = reader.size("intermediate_size", 12_288)
    layer = Layer(attention, Mlp(width, norm, activation, gated=False, bias=bias))
    layers = (layer,) * common.num_layers(reader)
    decoder = common.read_decoder(reader, layers, max_position=4096, tied_embeddings=True)
    return replace(decoder, names=NAMES)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    attention = decoder.layers[0].attention
    written = common.write_decoder(decoder, "starcoder2", "Starcoder2ForCausalLM")
    return written | {
        "norm_epsilon": written.pop("rms_norm_eps"),
        "use_bias": attention.qkv_bias,
        "sliding_window": attention.window,
    }
