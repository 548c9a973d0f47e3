"""Gemma 3 with a vision tower: the text model of it, `text_config`; the tower is skipped.

Source: transformers, models/gemma3/modeling_gemma3.py.
"""

from __future__ import annotations

from rooflax.models import gemma3_text
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
SKIPPED = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
"""Tensors of the checkpoint that the text model has no use for."""

config_to_hf = gemma3_text.config_to_hf


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("vision_config", "mm_tokens_per_image", "*_token_index", "*_token_id")
    text = reader.part("text_config")
    text.expect("model_type", "gemma3_text")
    text.expect("tie_word_embeddings", reader.flag("tie_word_embeddings", True))
    return gemma3_text.config_from_hf(text)
