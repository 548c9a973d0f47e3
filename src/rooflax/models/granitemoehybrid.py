"""Granite 4 without Mamba layers and experts (350M, 1B, micro): Granite, with or without RoPE.

The file is longer than others, since it reads which of the family's kinds of layers a model has.
Rejected: Mamba layers, experts.

Source: transformers, models/granitemoehybrid/modeling_granitemoehybrid.py; IBM, Granite 4.0, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import UnsupportedModelError
from rooflax.models import common, granite
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, ToldBy
from rooflax.models.gguf_changes import Halves
from rooflax.models.gguf_names import COMMON
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Mlp
from rooflax.nn.weights import StoredAs

SHARED = "model.layers.{i}.shared_mlp"
NAMES = TensorNames(
    (
        ("layers.{i}.mlp.gate_up", StoredAs(f"{SHARED}.input_linear.weight")),
        ("layers.{i}.mlp.down", StoredAs(f"{SHARED}.output_linear.weight")),
    )
)
GGUF = GGUFSpec(
    "granite", told_by=ToldBy("granite", "rope.scaling.finetuned", lambda value: value is False),
    keys=COMMON | granite.SCALES | {"feed_forward_length": "shared_intermediate_size"},
    stated={"num_local_experts": 0, "position_embedding_type": None}, waived=granite.WAIVED,
    read=lambda reader, raw: reader.attention(raw)
    | {"layer_types": ["attention"] * raw.get("num_hidden_layers", 0)},
    tensors={
        f"{SHARED}.input_linear.weight": (
            ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"), Halves(),
        ),
    },
    permuted=True, output_bias=True,
)  # fmt: skip
TINY = granite.TINY | {
    "num_local_experts": 0, "shared_intermediate_size": 104, "intermediate_size": 20,
    "layer_types": ["attention"] * 3, "position_embedding_type": "rope", "mamba_n_heads": 4,
    "mamba_d_head": 30, "pad_token_id": 0,
}  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(intermediate_size=11_008)
    reader.waive("mamba_*", "time_step_*", "num_experts_per_tok", "init_method")
    for key, only in (("normalization_function", "rmsnorm"), ("mlp_bias", False)):
        reader.expect(key, only)
    has_rope = reader.get("position_embedding_type", None) == "rope"
    reader.expect("position_embedding_type", "rope", "nope", None)
    if experts := reader.size("num_local_experts", 8, least=0):
        raise UnsupportedModelError(
            f"config.json has num_local_experts = {experts}; of granitemoehybrid rooflax computes "
            f"models without experts."
        )
    key = "layers_block_type" if reader.has("layers_block_type") else "layer_types"
    types = reader.get(key, ["mamba"])
    named = ("attention", "full_attention")  # the latter by newer versions of transformers
    if types not in [[name] * common.num_layers(reader) for name in named]:
        raise UnsupportedModelError(
            f"config.json has {key} = {types!r:.80}; of granitemoehybrid rooflax computes models "
            f"whose layers are all attention."
        )
    decoder = granite.config_from_hf(reader)
    attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
    layer = replace(
        decoder.layers[0],
        attention=attention if has_rope else replace(attention, rope=None),
        mlp=replace(mlp, width=reader.size("shared_intermediate_size", 1024)),
    )
    return replace(decoder, layers=(layer,) * len(decoder.layers), ropes=(), names=NAMES)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return granite.config_to_hf(decoder) | {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": mlp.width,
        "num_local_experts": 0,
        "position_embedding_type": "rope" if decoder.ropes else None,
        "layer_types": ["attention"] * decoder.num_layers,
    }
