"""Mistral Small 3.1 and later with a vision tower: the text model, `text_config`, which is Mistral.

Rejected: text models of another kind, such as Ministral 3's.

Source: transformers, models/mistral3/modeling_mistral3.py.
"""

from __future__ import annotations

from rooflax.models import mistral
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gemma3 import HF_PREFIXES, SKIPPED
from rooflax.nn.decoder import Decoder

__all__ = ["HF_PREFIXES", "SKIPPED", "config_from_hf", "config_to_hf"]

SKIPPED_KEYS = (
    "vision_config", "projector_hidden_act", "vision_feature_layer", "image_token_*",
    "multimodal_projector_bias", "spatial_merge_size",
)  # fmt: skip

config_to_hf = mistral.config_to_hf


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    text = reader.part("text_config")
    text.expect("model_type", "mistral")
    if reader.given("tie_word_embeddings"):
        tied = reader.flag("tie_word_embeddings", False)
        text.assume(tie_word_embeddings=tied)
        text.expect("tie_word_embeddings", tied)
    return mistral.config_from_hf(text)
