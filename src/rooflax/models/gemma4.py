"""Gemma 4 with towers for images and sound: the text model of it, `text_config`, alone.

Source: transformers, models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from rooflax.models import gemma4_text, mixers
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
TOWERS = r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*"
SKIPPED = f"{gemma4_text.SKIPPED}|{TOWERS}"
"""Tensors of the checkpoint that the text model has no use for."""

config_to_hf = gemma4_text.config_to_hf


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("vision_config", "audio_config", "*_token_id", "*_token_index")
    reader.waive("vision_soft_tokens_per_image")
    return gemma4_text.config_from_hf(mixers.read_text_part(reader, "gemma4_text"))
