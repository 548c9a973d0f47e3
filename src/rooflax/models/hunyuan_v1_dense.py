"""Hunyuan 0.5B to 7B and Hunyuan-MT, dense: LLaMA with norms of every head after RoPE.

RoPE scaling "dynamic" with an alpha is a larger theta; without one it changes nothing.

Source: transformers, models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py; Tencent, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.rope_reader import read_rope
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import ATTENTION
from rooflax.nn.rope import MOST, Rope
from rooflax.nn.weights import StoredAs

NAMES = TensorNames(tuple(
    (f"layers.{{i}}.attn.{part[0]}_norm", StoredAs(f"{ATTENTION}.{part}_layernorm.weight"))
    for part in ("query", "key")
))  # fmt: skip
STATED = {
    "use_qk_norm": True, "use_cla": False, "mlp_bias": False, "norm_type": "rms",
    "use_rotary_pos_emb": True, "add_classification_head": False,
}  # fmt: skip
SKIPPED_KEYS = ("cla_*", "class_num", "dense_list", "pool_type", "org_vocab_size", "*_id")
"""Keys of shared K/V and of a classifier's head, which `STATED` excludes, and tokens."""
GGUF = GGUFSpec("hunyuan-dense", waived=("rope.scaling.original_context_length",))
"""The scaling of RoPE is in theta."""
TINY = common.tiny(
    rope_theta=100.0, pad_token_id=0,
    rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32},
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    for key, only in STATED.items():
        reader.expect(key, only)
    parts = common.read_biases(reader) | {"theta": None, "norm_after_rope": True}
    attention = common.read_attention(reader, norm_eps=1e-5, **parts)
    reader.expect("attention_head_dim", attention.head_dim)
    rope = _read_rope(reader, attention.head_dim)
    attention = replace(attention, rope=rope, qk_norm=attention.norm.eps)
    return replace(common.read_dense(reader, attention, max_position=2048), names=NAMES)


def _read_rope(reader: ConfigReader, head_dim: int) -> Rope:
    key = "rope_parameters" if reader.get("rope_parameters", None) else "rope_scaling"
    scaling_values = reader.get(key, None)
    if not isinstance(scaling_values, dict) or not scaling_values.get("alpha"):
        return read_rope(reader, head_dim)
    scaling = reader.inner(key, scaling_values)
    scaling.waive("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
    for key in ("type", "rope_type"):
        scaling.expect(key, "dynamic")
    theta = scaling.number("rope_theta", reader.number("rope_theta", 10_000.0))
    if head_dim == 2:
        raise CheckpointError(
            "config.json has head_dim = 2 and rope_scaling.alpha, which needs more."
        )
    theta *= scaling.number("alpha", most=MOST) ** (head_dim / (head_dim - 2))
    scaling.finish()
    return Rope(theta)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")
    return written | {"attention_bias": decoder.layers[0].attention.qkv_bias}
