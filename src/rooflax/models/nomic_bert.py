"""Nomic's BERT (nomic-embed-text v1 and v1.5): RoPE, SwiGLU, no biases; GPT-2's keys or BERT's.

Rejected: experts, biases, scaled RoPE, other wirings.

Source: transformers, models/nomic_bert/modeling_nomic_bert.py; Nussbaum et al., 2024.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("", "bert.", "nomic_bert.")
SKIPPED = r"((nomic_)?bert\.)?pooler\..*|(cls|classifier)\..*"
KEYS = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base",
}  # fmt: skip
NAMES = encoders.bert_names(
    "",
    "encoder.layers.{i}",
    embed_norm="emb_ln",
    attn__qkv="attn.Wqkv",
    attn__o="attn.out_proj",
    attn__post_norm="norm1",
    mlp__gate_up=("mlp.fc12", "mlp.fc11"),
    mlp__down="mlp.fc2",
    mlp__post_norm="norm2",
)
THETA = 1000.0
GGUF = GGUFSpec(
    "nomic-bert",
    keys=encoders.GGUF_KEYS | {"rope.freq_base": "rope_theta"},
    biases={},
    is_written=False,
    tensors=encoders.gguf_tensors(NAMES),
    read=lambda reader, raw: reader.encoder(raw),
)


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.rename(KEYS)
    reader.expect("activation_function", "swiglu")
    reader.expect("rotary_emb_fraction", 1.0)
    for key in ("rotary_emb_interleaved", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        reader.expect(key, False)
    for key in ("prenorm", "use_rms_norm", "parallel_block", "causal"):
        reader.expect(key, False)
    reader.waive(
        "fused_*", "use_flash_attn", "use_xentropy", "residual_in_fp32", "pad_vocab_size_*",
        "max_trained_positions", "parallel_block_tied_norm", "dense_seq_output",
        "last_layer_subset", "scale_attn_*", "reorder_and_upcast_attn",
    )  # fmt: skip
    defaults: dict[str, Any] = {"theta": THETA, "gated": True, "bias": False}
    return encoders.read_encoder(reader, NAMES, token_types=2, max_position=2048, **defaults)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = encoders.write_encoder(decoder, "nomic_bert", "NomicBertModel")
    return written | {"rope_theta": decoder.ropes[0].theta}
