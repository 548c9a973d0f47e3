"""Qwen 3.5 and 3.6's text model: Qwen3-Next's layers with dense feed-forward networks.

Source: transformers, models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import common, mixers
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, POST_NORM
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
SKIPPED = r"(model\.)?(mtp|visual)\..*"
"""Tensors of the checkpoint that the text model has no use for."""
SKIPPED_KEYS = ("mtp_*", "mamba_ssm_dtype")
"""Keys of further heads that draft tokens, and of a state that is float32 here anyway."""
GGUF = GGUFSpec(
    "qwen35", keys=COMMON | mixers.KEYS, partial=True, read=mixers.read_gguf,
    write=mixers.write_image_gguf,
    tensors=lambda decoder, _: POST_NORM | mixers.delta_tensors(decoder), adds_one=True,
)  # fmt: skip
TINY = common.tiny(rms_norm_eps=1e-6, **mixers.TINY)


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    reader.expect("mlp_only_layers", [])
    attention, delta = mixers.read_mixers(reader, kv_heads=4)
    mlp = common.read_mlp(reader, attention.norm)
    return mixers.read_layers(reader, attention, delta, [mlp] * common.num_layers(reader))


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "qwen3_5_text", "Qwen3_5ForCausalLM")
    bias = {"attention_bias": decoder.attention.qkv_bias}
    return written | mixers.write_mixers(decoder) | bias
