"""A checkpoint of random weights at a real model's size, with all that the peers' converters read.

    python checkpoint.py gpt2 FOLDER

The weights are bfloat16; whoever measures float32 widens them. The tokenizer is trained on Python's
own library and padded to the size of the embedding, because converters insist on that. Speed can
be measured with it, and nothing else.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer

import rooflax

END = "<|endoftext|>"
TRAINED_VOCABULARY = 4000
TRAINING_FILES = 40
TOKENIZER_CLASSES = {"gpt2": "GPT2Tokenizer", "qwen2.5-0.5b": "Qwen2Tokenizer"}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    rooflax.save(rooflax.load(f"preset:{name}"), folder, dtype="bfloat16")
    config = edited(folder / "config.json", lambda raw: with_context(raw))
    write_tokenizer(folder, config["vocab_size"], TOKENIZER_CLASSES.get(name, "GPT2Tokenizer"))


def with_context(raw: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's converter looks for the older name of GPT-2's context."""
    return raw | ({"n_ctx": raw["n_positions"]} if "n_positions" in raw else {})


def write_tokenizer(folder: Path, vocab_size: int, tokenizer_class: str) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(f) for f in files], vocab_size=TRAINED_VOCABULARY, special_tokens=[END])
    bpe.save(str(folder / "tokenizer.json"))
    bpe.save_model(str(folder))

    def padded(vocab: dict[str, int]) -> dict[str, int]:
        return vocab | {f"\u0120\u0120unused{i}": i for i in range(len(vocab), vocab_size)}

    edited(folder / "vocab.json", padded)

    def with_padding(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"model": raw["model"] | {"vocab": padded(raw["model"]["vocab"])}}

    edited(folder / "tokenizer.json", with_padding)
    settings = {"tokenizer_class": tokenizer_class, "eos_token": END, "bos_token": END}
    text = json.dumps(settings | {"unk_token": END}, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def edited(path: Path, change: Any) -> Any:
    """Rewrites a JSON file; what it holds then."""
    found = change(json.loads(path.read_text()))
    path.write_text(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
