"""MPNet (all-mpnet-base): RoBERTa without token types, a bias of scores by the distance.

Source: transformers, models/mpnet/modeling_mpnet.py; Song et al., 2020.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.distances import NUM_BUCKETS

HF_PREFIXES = ("mpnet.", "")
SKIPPED = r"(mpnet\.)?(pooler\..*|embeddings\.position_ids)|(lm_head|classifier)\..*"
FIRST_POSITION = 2
NAMES = encoders.bert_names(
    "mpnet.",
    distances="encoder.relative_attention_bias",
    attn__qkv=tuple(f"attention.attn.{part}" for part in "qkv"),
    attn__o="attention.attn.o",
    attn__post_norm="attention.LayerNorm",
)
SCORE_HEAD = encoders.TANH_HEAD


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.expect("relative_attention_num_buckets", NUM_BUCKETS)
    encoder = encoders.read_encoder(reader, NAMES, first_position=FIRST_POSITION)
    return replace(encoder, distances=True)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = encoders.write_encoder(decoder, "mpnet", "MPNetModel")
    return written | {"relative_attention_num_buckets": NUM_BUCKETS}
