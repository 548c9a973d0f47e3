"""RoBERTa (all-distilroberta): BERT whose first rows of positions are no token's.

Source: transformers, models/roberta/modeling_roberta.py; Liu et al., 2019.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("roberta.", "")
SKIPPED = r"(roberta\.)?(pooler\..*|embeddings\.position_ids)|(lm_head|classifier)\..*"
NAMES = encoders.bert_names("roberta.")
SCORE_HEAD = encoders.TANH_HEAD


def config_from_hf(reader: ConfigReader) -> Decoder:
    padding = reader.size("pad_token_id", 1, least=0)
    return encoders.read_encoder(reader, NAMES, first_position=padding + 1, token_types=2)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = encoders.write_encoder(decoder, "roberta", "RobertaModel")
    return written | {"pad_token_id": decoder.first_position - 1}
