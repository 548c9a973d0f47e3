"""DeepSeek's models in config.json and GGUF files: latent attention, experts and shared experts.

Where transformers has a default, a family gives it (`ConfigReader.assume`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, Metadata, MetadataReader, Raw, full_rope
from rooflax.models.gguf_changes import HeadStacks
from rooflax.models.gguf_names import COMMON, NameTable
from rooflax.models.glm4_moe import CHOICE_BIAS, KEYS, NAMES
from rooflax.models.rope_reader import read_rope
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import LatentAttention
from rooflax.nn.parts import ATTENTION, Layer, Mlp, Moe
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS

SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
QUERY_RANK = 1536
TRAINING = ("seq_aux", "aux_loss_alpha", "ep_size")
KNOWN_BY_DEPTH = (26, 27)
"""Layers of the models whose queries have no latent, by which llama.cpp knows them."""
ONE_HEAD = ("attention.head_count_kv", "attention.key_length")
"""Keys that are of the latent itself in GGUF files."""
KV_B = f"{ATTENTION}.kv_b_proj"
TINY = common.tiny(
    "head_dim", hidden_size=48, num_attention_heads=6, num_key_value_heads=6, q_lora_rank=None,
    kv_lora_rank=20, qk_nope_head_dim=14, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=6,
    num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)  # fmt: skip


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
    """Expert groups, where only some are selected."""
    groups, chosen = reader.size("n_group"), reader.size("topk_group")
    return {} if groups == chosen else {"groups": groups, "chosen_groups": chosen}


def read_attention(reader: ConfigReader, interleaved: bool) -> LatentAttention:
    reader.assume(**SIZES)
    rank, nope, rope_dim, value = (reader.size(key, most=common.MOST_DIMENSIONS) for key in SIZES)
    heads = reader.size("num_attention_heads")
    for key, dim in (("num_key_value_heads", heads), ("head_dim", rope_dim)):
        reader.expect(key, dim)
    reader.expect("qk_head_dim", nope + rope_dim)
    if rope_dim % 2:
        raise CheckpointError(f"config.json has qk_rope_head_dim = {rope_dim}; it must be even.")
    query_rank = None if reader.has("q_lora_rank") else QUERY_RANK
    if reader.get("q_lora_rank", query_rank) is not None:
        query_rank = reader.size("q_lora_rank", query_rank)
    rope = read_rope(reader, rope_dim)
    stated = reader.get("rope_parameters", None) or reader.get("rope_scaling", None) or {}
    mscale = stated.get("mscale_all_dim") or 0.0 if rope.scaling else 0.0
    norm = NormKind(reader.number("rms_norm_eps", 1e-6))
    sizes = heads, nope, rope_dim, value, rank, norm, rope, query_rank
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


def _gguf_tensors(decoder: Decoder, present: Collection[str]) -> NameTable:
    """Keys and values of heads apart, where a file does not have the one tensor of old ones."""
    part = decoder.attention
    if not isinstance(part, LatentAttention) or "blk.0.attn_kv_b.weight" in present:
        return CHOICE_BIAS
    stacks = HeadStacks(part.num_heads, (part.nope_dim, part.value_dim))
    stored = ("blk.{i}.attn_k_b.weight", "blk.{i}.attn_v_b.weight")
    return CHOICE_BIAS | {f"{KV_B}.weight": (stored, stacks)}


def read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    """Latent attention, of which files have the one key and value; old ones those of heads."""
    reader.expect("expert_gating_func", 1, 2)  # softmax, sigmoids
    heads, rope_dim = raw.get("num_attention_heads"), raw.get("qk_rope_head_dim")
    rank, size = raw.get("kv_lora_rank"), reader.get("attention.key_length_mla")
    if is_old := size is None:
        size = reader.get("attention.key_length")
    elif type(rank) is int and type(rope_dim) is int:
        reader.expect("attention.key_length", rank + rope_dim)
        reader.expect("attention.value_length", rank)
    reader.expect("attention.head_count_kv", heads if is_old else 1)
    if type(size) is not int or type(rope_dim) is not int:
        raise CheckpointError(
            f"{reader.file.path} has heads of {size!r:.20} dimensions, of which RoPE turns "
            f"{rope_dim!r:.20}; these must be whole numbers."
        )
    theta = raw.get("rope_theta", 10_000.0)
    stated = reader.count_without(raw.get("num_nextn_predict_layers", 0), raw) | {
        "num_key_value_heads": heads, "qk_nope_head_dim": size - rope_dim,
        "q_lora_rank": raw.get("q_lora_rank") or None,
        "rope_theta": theta, "rope_scaling": reader.rope_scaling(rope_dim, theta),
    }  # fmt: skip
    return stated | ({"v_head_dim": reader.get("attention.value_length")} if is_old else {})


def _write_gguf(decoder: Decoder, raw: Raw) -> Metadata:
    """Sizes of heads, and of the one key and value that files have of latent attention."""
    part = decoder.attention
    assert isinstance(part, LatentAttention)
    return {
        "attention.head_count_kv": 1,
        "attention.value_length": part.rank,
        "attention.key_length_mla": part.nope_dim + part.rope_dim,
        "attention.q_lora_rank": part.query_rank or 0,  # llama.cpp requires the key
        "rope.dimension_count": part.rope_dim,
    }


def _lacks(decoder: Decoder) -> str | None:
    """RoPE that scales other than scores, and latents that llama.cpp does not expect."""
    part, scaling = decoder.attention, full_rope(decoder).scaling
    assert isinstance(part, LatentAttention)
    if scaling and not (part.mscale and scaling.attention_factor == 1):
        return "whose mscale and mscale_all_dim are not the same number"
    if part.query_rank and decoder.num_layers in KNOWN_BY_DEPTH:
        return f"with a q_lora_rank in {decoder.num_layers} layers"
    return None


GGUF = GGUFSpec(
    "deepseek2", read=read_gguf, write=_write_gguf, lacks=_lacks, tensors=_gguf_tensors,
    keys={key: hf for key, hf in COMMON.items() if key not in ONE_HEAD} | KEYS | {
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    absent={
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
)  # fmt: skip
