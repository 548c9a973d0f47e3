"""DeepSeek-V3, R1 and Moonlight: latent attention, and experts chosen by sigmoids and a bias.

The first layers have no experts. The layer that predicts further tokens is skipped. Rejected:
a `moe_layer_freq` other than 1.

Source: transformers, models/deepseek_v3/modeling_deepseek_v3.py; DeepSeek-AI, DeepSeek-V3 Technical
Report, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import latent
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import ToldBy
from rooflax.models.glm4_moe import read_further
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import LatentAttention

DEFAULTS = {
    "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
}  # fmt: skip

GGUF = replace(
    latent.GGUF, told_by=ToldBy("deepseek2", "expert_gating_func", lambda gate: gate == 2)
)
TINY = latent.TINY | {
    "q_lora_rank": 28, "n_group": 3, "topk_group": 2, "attention_bias": True,
    "first_k_dense_replace": 0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    if not reader.has("num_key_value_heads"):
        reader.assume(num_key_value_heads=128)
    reader.assume(**DEFAULTS)
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    renormalise = reader.flag("norm_topk_prob", not reader.is_null("norm_topk_prob"))
    routing = {"biased": True, "renormalise": renormalise}
    routing |= latent.read_groups(reader)
    interleaved = reader.flag("rope_interleave", not reader.is_null("rope_interleave"))
    decoder = latent.read_model(reader, routing, max_position=4096, interleaved=interleaved)
    decoder, moe = replace(decoder, names=read_further(reader)), decoder.moe
    if moe is not None and moe.groups > 1 and moe.num_experts == moe.groups:
        raise CheckpointError(
            f"config.json has n_group = {moe.groups} of as many experts; a group needs two."
        )
    return decoder


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    assert isinstance(decoder.attention, LatentAttention)
    written = latent.write_model(decoder, "deepseek_v3", "DeepseekV3ForCausalLM")
    further = {"num_nextn_predict_layers": decoder.names.further}
    return written | further | {"rope_interleave": decoder.attention.interleaved}
