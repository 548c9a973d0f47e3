"""Tiny encoders whose GGUF files, made by llama.cpp's own converter, are in tests/data/gguf.

`tests.make_gguf_fixtures` makes them. Values follow from the tensors' names (encoder_cases.py), so
tokenizers alone are kept beside them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests import encoder_cases, gguf_cases, pooling_cases, tokenizer_cases

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("wordpiece", "cls_token", {"hidden_size": 24, "layer_norm_eps": 1e-12}),
    "xlm_roberta": ("unigram", "", {"hidden_size": 24, "pad_token_id": 1}),
    "nomic_bert": (
        "wordpiece", "mean_tokens",
        {
            "hidden_size": 24, "n_positions": 8192, "max_position_embeddings": 8192,
            "activation_function": "swiglu", "causal": False, "qkv_proj_bias": False,
            "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None, "rotary_emb_base": 300.0,
        },
    ),
    "modernbert": (
        "bytes", "mean_tokens",
        {"hidden_size": 24, "num_hidden_layers": 4, "layer_norm_eps": 1e-5},
    ),
}  # fmt: skip
"""Variants of encoder_cases.py: tokenizer, pooling ("" scores pairs), changes of config.json."""
TEXTS = tokenizer_cases.TEXTS[:3]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ENDS = ("<s>", "<pad>", "</s>", "<unk>")
SPACE = "\u2581"


def kept(name: str) -> Path:
    """The GGUF file of a case."""
    return gguf_cases.FOLDER / f"{name}.f32.gguf"


def tokenizer_file(kind: str) -> Path:
    """The kept tokenizer of a kind."""
    return gguf_cases.FOLDER / "encoders" / f"{kind}.json"


@cache
def tokenizer(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer as published encoders of the kind have it."""
    return tokenizers.Tokenizer.from_file(str(tokenizer_file(kind)))


def trained(kind: str) -> tokenizers.Tokenizer:
    """A new tokenizer of "wordpiece" or "bytes"."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=level.alphabet(), show_progress=False
        )
        made.train_from_iterator(TEXTS, trainer)
        made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=list(SPECIAL), show_progress=False
        )
        made.train_from_iterator(TEXTS, trainer)
    ids = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return made


def unigram(pieces: list[tuple[str, float]], table: str) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer of a SentencePiece model, as transformers converts it.

    Args:
        pieces: with their scores.
        table: of characters that are rewritten, in base64.
    """
    scored = [(token, 0.0) for token in ENDS] + pieces[3:] + [("<mask>", 0.0)]
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=3))
    rewrites = {"type": "Precompiled", "precompiled_charsmap": table}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE}
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = [AddedToken(t, special=True, normalized=False) for t in (*ENDS, "<mask>")]
    made.add_special_tokens(special)
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids
    )
    parts = json.loads(made.to_str())
    parts["normalizer"] = {"type": "Sequence", "normalizers": [
        rewrites, {"type": "Strip", "strip_left": True, "strip_right": True}, spaces,
    ]}  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def write(folder: Path, name: str) -> Path:
    """The checkpoint that a case's file was made from."""
    kind, mode, changes = CASES[name]
    made = tokenizer(kind)
    changes = changes | {"vocab_size": made.get_vocab_size(), "num_attention_heads": 4}
    encoder_cases.write(folder, name, scores=not mode, **changes)
    made.save(str(folder / "tokenizer.json"))
    names = (ENDS if kind == "unigram" else SPECIAL)[0 if kind == "unigram" else 1 :]
    keys = (
        ("cls_token", "pad_token", "sep_token", "unk_token")
        if kind == "unigram" else ("unk_token", "cls_token", "sep_token", "mask_token")
    )  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(zip(keys, names, strict=True))
    config |= {"pad_token": "<pad>" if kind == "unigram" else "[PAD]"}
    if kind == "unigram":
        config |= {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if mode:
        pooling = pooling_cases.pooling(mode, changes["hidden_size"])
        pooling_cases.write_modules(folder, pooling, pooling_cases.NORMALIZE)
    return folder
