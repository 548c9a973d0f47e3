"""What config.json says of layers with the gated delta rule and with gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Attention, Layer, Mlp, Moe
from rooflax.nn.recurrent import GatedDelta

KINDS = ("full_attention", "linear_attention")


def read_mixers(
    reader: ConfigReader, *, kv_heads: int, fused: bool = False
) -> tuple[Attention, GatedDelta]:
    reader.expect("attn_output_gate", True)
    how = {"norm_eps": 1e-6, "kv_heads": kv_heads, "head_dim": 256, "partial": 0.25}
    attention = common.read_attention(reader, **how, **common.read_biases(reader))
    norm = replace(attention.norm, plus_one=True)
    keys = reader.size("linear_num_key_heads", 16)
    values = reader.size("linear_num_value_heads", 32)
    if values % keys:
        raise CheckpointError(
            f"config.json has linear_num_value_heads = {values} and linear_num_key_heads = {keys}; "
            f"the first must be a multiple of the second."
        )
    key_dim, value_dim = (reader.size(f"linear_{p}_head_dim", 128) for p in ("key", "value"))
    taps = reader.size("linear_conv_kernel_dim", 4, least=2)
    delta = GatedDelta(keys, values // keys, key_dim, value_dim, taps, norm, fused)
    return replace(attention, norm=norm, qk_norm=norm.eps, gate=True), delta


def read_layers(
    reader: ConfigReader, attention: Attention, delta: GatedDelta, mlps: Sequence[Mlp | Moe]
) -> Decoder:
    interval = reader.size("full_attention_interval", 4)
    default = [KINDS[(i + 1) % interval != 0] for i in range(len(mlps))]
    mixers: dict[str, Any] = dict(zip(KINDS, (attention, delta), strict=True))
    kinds = reader.layer_types(len(mlps), default, KINDS)
    layers = (Layer(mixers[kind], mlp) for kind, mlp in zip(kinds, mlps, strict=True))
    return common.read_decoder(reader, layers, max_position=32_768)


def write_mixers(decoder: Decoder) -> dict[str, Any]:
    kinds = [isinstance(layer.attention, GatedDelta) for layer in decoder.layers]
    delta = next((x.attention for x in decoder.layers if isinstance(x.attention, GatedDelta)), None)
    moe = decoder.moe
    written: dict[str, Any] = {"layer_types": [KINDS[kind] for kind in kinds]}
    written |= common.rotary_share(decoder)
    written |= {"shared_expert_intermediate_size": moe.shared} if moe else {}
    return written if delta is None else written | {
        "linear_num_key_heads": delta.num_heads,
        "linear_num_value_heads": delta.num_heads * delta.group,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
    }  # fmt: skip


def read_text_part(reader: ConfigReader, model_type: str) -> ConfigReader:
    """text_config; whether embeddings are tied may stand beside it, and must then agree."""
    text = reader.part("text_config")
    text.expect("model_type", model_type)
    if reader.given("tie_word_embeddings"):
        tied = reader.flag("tie_word_embeddings", False)
        text.assume(tie_word_embeddings=tied)
        text.expect("tie_word_embeddings", tied)
    return text
