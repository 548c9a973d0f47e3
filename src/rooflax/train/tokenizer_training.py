"""Training a byte-level BPE tokenizer for source code, in the files that transformers opens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rooflax.loading.gguf_tokenizer import PRE_TOKENIZERS

END_OF_TEXT = "<|endoftext|>"
MAX_TOKEN_LENGTH = 32  # characters; longer merges are banners and rulers

PATTERN = PRE_TOKENIZERS["stablelm2"].patterns[0]
"""Pieces as Qwen2 cuts them, without its composing: GGUF has a name for it, so that llama.cpp opens
what is trained here."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """A byte-level BPE tokenizer; every text can be encoded, none needs an unknown token.

    Pieces are cut as Qwen2's tokenizer does: digits stand alone, and a line break belongs to the
    operators before it. The only special token is `<|endoftext|>`, id 0; nothing is added to a
    text.

    Args:
        vocab_size: tokens in all, the 256 bytes and the special one included.

    Source: Radford et al., 2019 (GPT-2's byte-level BPE).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_LENGTH,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Args:
        model_max_length: context length in tokens, for information.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
