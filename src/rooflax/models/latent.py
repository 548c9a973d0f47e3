"""What config.json says of DeepSeek's models: latent attention, experts and shared experts.

Where transformers has a default, a family gives it (`ConfigReader.assume`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.glm4_moe import NAMES
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import LatentAttention
from rooflax.nn.parts import Layer, Mlp, Moe
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
QUERY_RANK = 1536
TRAINING = ("seq_aux", "aux_loss_alpha", "ep_size")


def read_model(
    reader: ConfigReader, routing: dict[str, Any], *, max_position: int, interleaved: bool = True
) -> Decoder:
    """
    Args:
        routing: of `Moe`, what the family has beside sizes and scale.
        max_position: the family's default.
    """
    reader.waive(*TRAINING)
    reader.expect("moe_layer_freq", 1)
    attention = read_attention(reader, interleaved)
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "silu")
    dense = Mlp(reader.size("intermediate_size"), attention.norm, activation, key="dense_mlp")
    count = reader.size("n_routed_experts", most=common.MOST_EXPERTS)
    chosen = reader.size("num_experts_per_tok")
    groups, kept = routing.get("groups", 1), routing.get("chosen_groups", 1)
    if count % groups or kept > groups or chosen > count // groups * kept:
        raise CheckpointError(
            f"config.json has num_experts_per_tok = {chosen} of n_routed_experts = {count}, and "
            f"n_group = {groups} of which topk_group = {kept} are chosen; groups must divide the "
            f"experts, and the chosen groups have as many as a token gets."
        )
    width = reader.size("moe_intermediate_size")
    sparse = Moe(
        count, chosen, width, attention.norm, activation, shared_gated=False,
        shared=width * reader.size("n_shared_experts"),
        scale=reader.number("routed_scaling_factor"), **routing,
    )  # fmt: skip
    first = reader.size("first_k_dense_replace", least=0)
    mlps = (dense if i < first else sparse for i in range(common.num_layers(reader)))
    layers = [Layer(attention, mlp) for mlp in mlps]
    decoder = common.read_decoder(reader, layers, max_position=max_position)
    return replace(decoder, names=NAMES)


def read_groups(reader: ConfigReader) -> dict[str, int]:
    """Of experts, where not all are chosen."""
    groups, chosen = reader.size("n_group"), reader.size("topk_group")
    return {} if groups == chosen else {"groups": groups, "chosen_groups": chosen}


def read_attention(reader: ConfigReader, interleaved: bool) -> LatentAttention:
    reader.assume(**SIZES)
    rank, nope, turned, value = (reader.size(key, most=common.MOST_DIMENSIONS) for key in SIZES)
    heads = reader.size("num_attention_heads")
    for key, dim in (("num_key_value_heads", heads), ("head_dim", turned)):
        reader.expect(key, dim)
    reader.expect("qk_head_dim", nope + turned)
    if turned % 2:
        raise CheckpointError(f"config.json has qk_rope_head_dim = {turned}; it must be even.")
    query_rank = None if reader.given("q_lora_rank") else QUERY_RANK
    if reader.get("q_lora_rank", query_rank) is not None:
        query_rank = reader.size("q_lora_rank", query_rank)
    rope = reader.rope(turned)
    stated = reader.get("rope_parameters", None) or reader.get("rope_scaling", None) or {}
    mscale = stated.get("mscale_all_dim") or 0.0 if rope.scaling else 0.0
    norm = NormKind(reader.number("rms_norm_eps", 1e-6))
    sizes = heads, nope, turned, value, rank, norm, rope, query_rank
    bias = reader.flag("attention_bias", False)
    return LatentAttention(*sizes, float(mscale), interleaved, bias)


def write_model(decoder: Decoder, model_type: str, architecture: str) -> dict[str, Any]:
    moe, attention = decoder.moe, decoder.attention
    assert moe is not None
    assert isinstance(attention, LatentAttention)
    written = common.write_decoder(decoder, model_type, architecture)
    if attention.mscale:
        written["rope_scaling"] |= {"mscale_all_dim": attention.mscale}
    return written | {
        "num_key_value_heads": attention.num_heads, "head_dim": attention.rope_dim,
        "q_lora_rank": attention.query_rank, "kv_lora_rank": attention.rank,
        "qk_nope_head_dim": attention.nope_dim, "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim, "attention_bias": attention.bias,
        "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.width, "n_shared_experts": moe.shared // moe.width,
        "routed_scaling_factor": moe.scale, "norm_topk_prob": moe.renormalise,
        "n_group": moe.groups, "topk_group": moe.chosen_groups,
        "first_k_dense_replace": sum(isinstance(layer.mlp, Mlp) for layer in decoder.layers),
    }  # fmt: skip
