"""Qwen 3.5 and 3.6, dense, with a vision tower: the text model, `text_config`, alone.

Source: transformers, models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from rooflax.models import qwen3_5_text
from rooflax.models.config_reader import ConfigReader
from rooflax.models.qwen3_5_text import HF_PREFIXES, SKIPPED
from rooflax.nn.decoder import Decoder

__all__ = ["HF_PREFIXES", "SKIPPED", "config_from_hf", "config_to_hf"]

config_to_hf = qwen3_5_text.config_to_hf


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("vision_config", "*_token_id", "language_model_only")
    text = reader.part("text_config")
    text.expect("model_type", "qwen3_5_text")
    if reader.given("tie_word_embeddings"):
        tied = reader.flag("tie_word_embeddings", False)
        text.assume(tie_word_embeddings=tied)
        text.expect("tie_word_embeddings", tied)
    return qwen3_5_text.config_from_hf(text)
