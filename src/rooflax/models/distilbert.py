"""DistilBERT: BERT without token types, its keys and tensors by other names.

Source: transformers, models/distilbert/modeling_distilbert.py; Sanh et al., 2019.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder

HF_PREFIXES = ("distilbert.", "")
SKIPPED = (
    r"(vocab_(transform|layer_norm|projector)|pre_classifier|classifier)\..*"
    r"|(distilbert\.)?embeddings\.position_ids"
)
KEYS = {
    "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim", "hidden_act": "activation",
}  # fmt: skip
"""Its keys by BERT's."""
NAMES = encoders.bert_names(
    "distilbert.",
    "transformer.layer.{i}",
    attn__qkv=tuple(f"attention.{part}_lin" for part in "qkv"),
    attn__o="attention.out_lin",
    attn__post_norm="sa_layer_norm",
    mlp__up="ffn.lin1",
    mlp__down="ffn.lin2",
    mlp__post_norm="output_layer_norm",
)
SCORE_HEAD = encoders.ScoreHead((("pre_classifier", "ReLU"), ("classifier", "Identity")))


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive("sinusoidal_pos_embds")  # which are weights of the checkpoint, too
    reader.rename(KEYS)
    defaults = encoders.BASE | {"num_hidden_layers": 6}
    return encoders.read_encoder(reader, NAMES, defaults=defaults)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = encoders.write_encoder(decoder, "distilbert", "DistilBertModel")
    del written["layer_norm_eps"]
    return {KEYS.get(key, key): value for key, value in written.items()}
