"""Tokenizers of each kind, trained in a moment, saved as checkpoint folders have them."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from rooflax.loading.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "def main():\n    return 'naïve café' + \"日本語\" + '😀👩‍👩‍👧'  # comment",
    "<|im_end|> <s> system user assistant 0123456789 <| |> im_start end header",
] * 3


def byte_level(special, split=None, normalizer=None):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        byte_level
        if split is None
        else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return tokenizer


def sentencepiece():
    """Llama 2's kind: Metaspace, byte fallback, a leading space that decoding takes away."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    # Without splitting, a trainer sees whole lines: words are enough to learn merges from.
    words = [word for line in TEXT for word in line.split()]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama3():
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = byte_level(
        [*special, "<|eot_id|>"], split=r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
    )
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            ),
        ]
    )
    return tokenizer


def qwen():
    tokenizer = byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC()
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def gpt_oss():
    return byte_level(
        [
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|call|>",
        ]
    )


def gpt2():
    return byte_level(["<|endoftext|>"])


CONFIGS = {
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "llama2": {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"},
        "unk_token": "<unk>",
    },
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    },
    "gpt_oss": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
}
MAKERS = {
    "gpt2": gpt2,
    "llama2": sentencepiece,
    "llama3": llama3,
    "qwen": qwen,
    "gpt_oss": gpt_oss,
}


def _write_folder(folder: Path, kind: str, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    MAKERS[kind]().save(str(folder / "tokenizer.json"))
    full = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[kind], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(full))
    return folder


@pytest.fixture(scope="session")
def write_folder():
    """Writes a tokenizer folder of a kind, with further keys for its tokenizer_config.json."""
    return _write_folder


@pytest.fixture(scope="session")
def make_backend():
    """Trains the `tokenizers.Tokenizer` of a kind."""
    return lambda kind: MAKERS[kind]()


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """A Tokenizer of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(_write_folder(root / kind, kind)) for kind in MAKERS}
