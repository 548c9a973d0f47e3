"""BERT (MiniLM, BGE, E5, GTE): positions and token types are tables, a LayerNorm follows each sum.

GGUF files of RoBERTa, XLM-RoBERTa and DistilBERT are of its architecture, and open as BERT.

Source: transformers, models/bert/modeling_bert.py; Devlin et al., 2018.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("bert.", "")
SKIPPED = r"(bert\.)?(pooler\..*|embeddings\.position_ids)|(cls|classifier)\..*"
"""Heads, and a buffer."""
NAMES = encoders.bert_names("bert.")
GGUF = GGUFSpec(
    "bert",
    keys=encoders.GGUF_KEYS,
    biases={},
    is_written=False,
    tensors=encoders.gguf_tensors(NAMES),
    read=lambda reader, raw: reader.encoder(raw),
)
SCORE_HEAD = encoders.ScoreHead((("bert.pooler.dense", "Tanh"), ("classifier", "Identity")))


def config_from_hf(reader: ConfigReader) -> Decoder:
    return encoders.read_encoder(reader, NAMES, token_types=2)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    return encoders.write_encoder(decoder, "bert", "BertModel")
