"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts by softmax over all of them.

The first layers have no experts. Rejected: routing weights that are renormalised, biases of
feed-forward networks, a `moe_layer_freq` other than 1.

Source: transformers, models/deepseek_v2/modeling_deepseek_v2.py; DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import latent
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder

DEFAULTS = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "first_k_dense_replace": 0,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
METHODS = ("greedy", "group_limited_greedy")
GGUF = replace(
    latent.GGUF,
    read=lambda reader, raw: (
        latent.read_gguf(reader, raw) | ({"topk_method": METHODS[1]} if raw["n_group"] != 1 else {})
    ),
)
TINY = latent.TINY | {
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.9,
    },
}  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    reader.expect("scoring_func", "softmax")
    reader.expect("norm_topk_prob", False)
    reader.expect("mlp_bias", False)
    routing: dict[str, Any] = {"renormalise": False}
    if reader.choice("topk_method", METHODS, "greedy") == "greedy":
        for key in ("n_group", "topk_group"):
            reader.get(key, None)  # files state it, and greedy has none
    else:
        routing |= latent.read_groups(reader)
    return latent.read_model(reader, routing, max_position=2048)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    assert decoder.moe is not None
    method = METHODS[decoder.moe.groups > 1]
    written = latent.write_model(decoder, "deepseek_v2", "DeepseekV2ForCausalLM")
    return written | {"topk_method": method}
