"""Qwen 3 MoE: Qwen 3 with experts in place of the feed-forward network, in all layers or in some.

Source: transformers, models/qwen3_moe/modeling_qwen3_moe.py; Qwen Team, Qwen3 Technical Report,
2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp, Moe, NormKind
from rooflax.ops.activation import ACTIVATIONS


def config_from_hf(reader: ConfigReader) -> Decoder:
    biases = common.read_biases(reader)
    attention = common.read_attention(reader, norm_eps=1e-6, kv_heads=4, **biases)
    window = reader.size("sliding_window", 4096)
    window = window if reader.flag("use_sliding_window", False) else None
    reader.get("max_window_layers", None)  # written, and read by nobody
    attention = replace(attention, qk_norm=attention.norm.eps, window=window)
    dense, sparse = read_mlps(reader, attention.norm)
    mlps = (sparse if has else dense for has in read_sparse_layers(reader))
    layers = (Layer(attention, mlp) for mlp in mlps)
    return common.read_decoder(reader, layers, max_position=32_768)


def read_sparse_layers(reader: ConfigReader) -> list[bool]:
    """Which layers have experts."""
    count, step = common.num_layers(reader), reader.size("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r:.80}; it must be a list of layer numbers."
        )
    found = [i not in dense and (i + 1) % step == 0 for i in range(count)]
    if not any(found):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r:.80} and decoder_sparse_step = {step}, "
            f"which leave none of {count} layers with experts; use model_type qwen3 for that."
        )
    return found


def read_mlps(reader: ConfigReader, norm: NormKind) -> tuple[Mlp, Moe]:
    """The feed-forward networks of layers without experts and with them."""
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "silu")
    dense = Mlp(reader.size("intermediate_size", 6144), norm, activation, key="dense_mlp")
    key = "num_local_experts" if reader.given("num_local_experts") else "num_experts"
    count, chosen = common.read_experts(reader, key, 128, 8)
    reader.expect("num_experts", count)
    width = reader.size("moe_intermediate_size", 768)
    renormalise = reader.flag("norm_topk_prob", False)
    return dense, Moe(count, chosen, width, norm, activation, renormalise=renormalise)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    mlps, moe, attention = [x.mlp for x in decoder.layers], decoder.moe, decoder.attention
    assert moe is not None
    dense = {i: mlp for i, mlp in enumerate(mlps) if isinstance(mlp, Mlp)}
    widths = [*(mlp.width for mlp in dense.values()), moe.width]
    return common.write_decoder(decoder, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "intermediate_size": widths[0],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.width,
        "norm_topk_prob": moe.renormalise,
        "mlp_only_layers": list(dense),
        "attention_bias": attention.qkv_bias,
        "sliding_window": attention.window,
        "use_sliding_window": attention.window is not None,
    }
