"""Mixtral: Mistral with experts in place of the feed-forward network.

Source: transformers, models/mixtral/modeling_mixtral.py; Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, ToldBy
from rooflax.models.gguf_names import COMMON
from rooflax.models.mistral import read_window
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Layer, Moe
from rooflax.nn.tensor_layouts import Linear, Parallel, PerExpert
from rooflax.nn.weights import StoredAs
from rooflax.ops.activation import ACTIVATIONS

STORED = "model.layers.{i}.block_sparse_moe"
GGUF = GGUFSpec(
    "llama", told_by=ToldBy("llama", "expert_count", bool), biases={},
    keys=COMMON | {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    },
    permuted=True, output_bias=True,
)  # fmt: skip
TINY = common.tiny(num_local_experts=5, num_experts_per_tok=2, intermediate_size=32, hidden_size=56)


def config_from_hf(reader: ConfigReader) -> Decoder:
    parts = {"kv_heads": 8, "theta": 1_000_000.0, "window": read_window(reader, None)}
    attention = common.read_attention(reader, norm_eps=1e-5, **parts)
    reader.get("router_jitter_noise", None)  # of training
    count, chosen = common.read_experts(reader, "num_local_experts", 8, 2)
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "silu")
    moe = Moe(count, chosen, reader.size("intermediate_size"), attention.norm, activation)
    layers = [Layer(attention, moe)] * common.num_layers(reader)
    return replace(common.read_decoder(reader, layers, max_position=131_072), names=_names(moe))


def _names(moe: Moe) -> TensorNames:
    experts, mlp = f"{STORED}.experts", "layers.{i}.mlp"
    places = (
        (f"{mlp}.router", StoredAs(f"{STORED}.gate.weight", Linear())),
        (f"{mlp}.gate_up", StoredAs(moe.stored("w1", "w3", prefix=experts), PerExpert(Parallel()))),
        (f"{mlp}.down", StoredAs(moe.stored("w2", prefix=experts), PerExpert(Linear()))),
    )
    return TensorNames(places, either=(f"{mlp}.router",))  # of transformers 5


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    moe = decoder.moe
    assert moe is not None
    return common.write_decoder(decoder, "mixtral", "MixtralForCausalLM") | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "sliding_window": decoder.layers[0].attention.window,
    }
