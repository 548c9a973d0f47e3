"""XLM-RoBERTa (bge-m3, multilingual E5, bge-reranker): RoBERTa with another vocabulary.

Source: transformers, models/xlm_roberta/modeling_xlm_roberta.py; Conneau et al., 2019.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import roberta
from rooflax.nn.decoder import Decoder

MODEL_TYPE = "xlm-roberta"
HF_PREFIXES, SKIPPED, SCORE_HEAD = roberta.HF_PREFIXES, roberta.SKIPPED, roberta.SCORE_HEAD
config_from_hf = roberta.config_from_hf


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    names = {"model_type": MODEL_TYPE, "architectures": ["XLMRobertaModel"]}
    return roberta.config_to_hf(decoder) | names
