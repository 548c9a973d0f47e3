"""StableLM 2 and StableLM 3B: LLaMA with LayerNorm, and RoPE in a part of each head.

Rejected: q/k norms, attention and network side by side.

Source: transformers, models/stablelm/modeling_stablelm.py; Stability AI, Stable LM 2, 2024.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON
from rooflax.nn.decoder import Decoder
from rooflax.nn.wiring import NormKind

GGUF = GGUFSpec(
    "stablelm", keys=COMMON | {"attention.layer_norm_epsilon": "layer_norm_eps"},
    biases={"use_qkv_bias": "attn_q"}, partial=True, square=True,
    waived=("use_parallel_residual",),  # llama.cpp goes by ffn_norm
)  # fmt: skip
TINY = common.tiny(
    "head_dim", "rms_norm_eps", hidden_size=60, layer_norm_eps=1e-5, partial_rotary_factor=0.4,
    use_qkv_bias=True,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    for key in ("use_parallel_residual", "qk_layernorm"):
        reader.expect(key, False)
    reader.expect("head_dim", reader.size("hidden_size") // reader.size("num_attention_heads"))
    norm = NormKind(reader.number("layer_norm_eps", 1e-5), centered=True, bias=True)
    bias = reader.flag("use_qkv_bias", False)
    parts = {"kv_heads": 32, "partial": 0.25, "qkv_bias": bias}
    attention = common.read_attention(reader, norm=norm, **parts)
    return common.read_dense(reader, attention, max_position=4096)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "stablelm", "StableLmForCausalLM")
    return written | {
        "layer_norm_eps": written.pop("rms_norm_eps"),
        "use_qkv_bias": decoder.layers[0].attention.qkv_bias,
    } | common.rotary_share(decoder)  # fmt: skip
