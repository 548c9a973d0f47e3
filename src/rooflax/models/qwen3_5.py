"""Qwen 3.5 and 3.6, dense, with a vision tower: the text model, `text_config`, alone.

Source: transformers, models/qwen3_5/modeling_qwen3_5.py.
"""

from __future__ import annotations

from rooflax.models import mixers, qwen3_5_text
from rooflax.models.config_reader import ConfigReader
from rooflax.models.qwen3_5_text import HF_PREFIXES, SKIPPED
from rooflax.nn.decoder import Decoder

__all__ = ["HF_PREFIXES", "SKIPPED", "config_from_hf", "config_to_hf"]

config_to_hf = qwen3_5_text.config_to_hf


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("vision_config", "*_token_id", "language_model_only")
    text = mixers.read_text_part(reader, "qwen3_5_text")
    return qwen3_5_text.config_from_hf(text)
