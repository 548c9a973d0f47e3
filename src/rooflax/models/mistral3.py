"""Mistral Small 3.1 and later, Ministral 3, with a vision tower: the text model, `text_config`.

Rejected: text models of another kind than Mistral's and Ministral 3's.

Source: transformers, models/mistral3/modeling_mistral3.py.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import ministral3, mistral
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gemma3 import HF_PREFIXES, SKIPPED
from rooflax.nn.decoder import Decoder

__all__ = ["HF_PREFIXES", "SKIPPED", "config_from_hf", "config_to_hf"]

SKIPPED_KEYS = (
    "vision_config", "projector_hidden_act", "vision_feature_layer", "image_token_*",
    "multimodal_projector_bias", "spatial_merge_size",
)  # fmt: skip
FAMILIES = {"mistral": mistral, "ministral3": ministral3}
"""Families of the text model."""


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    text = reader.part("text_config")
    family = FAMILIES[text.choice("model_type", tuple(FAMILIES))]
    if reader.has("tie_word_embeddings"):
        tied = reader.flag("tie_word_embeddings", False)
        text.assume(tie_word_embeddings=tied)
        text.expect("tie_word_embeddings", tied)
    return family.config_from_hf(text)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    grows = any(rope.query_beta for rope in decoder.ropes)
    return FAMILIES["ministral3" if grows else "mistral"].config_to_hf(decoder)
