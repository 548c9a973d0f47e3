"""OLMo 2: LLaMA with norms on what each branch gives, and one of all query and of all key heads.

Source: transformers, models/olmo2/modeling_olmo2.py; OLMo Team, 2 OLMo 2 Furious, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import POST_NORM
from rooflax.nn.decoder import Decoder
from rooflax.nn.wiring import POST

GGUF = GGUFSpec("olmo2", tensors=POST_NORM, square=True, tied=False)
TINY = common.tiny("head_dim", hidden_size=60)


def config_from_hf(reader: ConfigReader) -> Decoder:
    options = common.read_biases(reader) | {"wiring": POST, "flat_norm": True}
    attention = common.read_attention(reader, norm_eps=1e-5, **options)
    attention = replace(attention, qk_norm=attention.norm.eps)
    return common.read_dense(reader, attention, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "olmo2", "Olmo2ForCausalLM")
    return written | {"attention_bias": decoder.layers[0].attention.qkv_bias}
