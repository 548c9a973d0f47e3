"""LLaMA 1 to 3.2 and models of its architecture: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Rejected: partial rotary dimensions, activations other than those of ops.activation.

Source: transformers, models/llama/modeling_llama.py; Touvron et al., LLaMA 2, 2023; Grattafiori et
al., The Llama 3 Herd of Models, 2024.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import BIASES
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Mlp

GGUF = GGUFSpec("llama", biases=BIASES, permuted=True, output_bias=True, mlp_bias=True)
TINY = common.tiny(rope_theta=500.0, rope_scaling=None)


def config_from_hf(reader: ConfigReader) -> Decoder:
    attention = common.read_attention(reader, norm_eps=1e-6, **common.read_biases(reader))
    mlp_bias = reader.flag("mlp_bias", False)
    return common.read_dense(reader, attention, mlp_bias=mlp_bias, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    return common.write_decoder(decoder, "llama", "LlamaForCausalLM") | write_biases(decoder)


def write_biases(decoder: Decoder) -> dict[str, bool]:
    attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return {"attention_bias": attention.qkv_bias, "mlp_bias": mlp.bias}
