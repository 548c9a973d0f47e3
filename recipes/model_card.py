"""Puts a finished run's model into the package: weights, tokenizer, card, log and curves.

    python recipes/model_card.py --run OUT

Reads OUT/model, OUT/summary.json, OUT/log.jsonl and OUT/curves.png, measures perplexity on the
shipped held-out text, and writes src/rooflax/assets/rooflax-python-5m.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSET = ROOT / "src" / "rooflax" / "assets" / "rooflax-python-5m"
HELD_OUT = ROOT / "tests" / "data" / "python_held_out.txt"

CARD = """---
license: psf-2.0
language: [code]
library_name: rooflax
tags: [python, llama]
---

# rooflax-python-5m

A LLaMA of {parameters:,} parameters (6 layers, width 256, 8 heads over 4 K/V heads, context
{context}) that writes Python. It is the model that rooflax runs when none is named: small enough to
ship, large enough to show that everything works. It does not know what it is talking about.

| | |
| --- | --- |
| data | sources of the Python {python} standard library with its tests, {num_files} files, {megabytes:.1f} MB, {corpus_tokens:,} tokens; a tenth of the files ({held_files}) held out |
| licence of the data | Python Software Foundation License 2.0 |
| tokenizer | byte-level BPE of 4,096 tokens, trained on the same files |
| tokens seen | {tokens:,} ({epochs:.1f} passes), sequences of 512 |
| held-out loss | {held_out_loss:.4f} nats per token over all held-out files |
| bits per byte | {bits_per_byte:.4f} over all held-out files |
| perplexity | {perplexity:.3f} on `tests/data/python_held_out.txt` ({text_bits:.4f} bits per byte) |
| file | bfloat16, {file_megabytes:.1f} MB |

The perplexity is what this prints, in float32:

```
rooflax perplexity -f tests/data/python_held_out.txt
```

Trained from scratch on two CPU cores by one command, which resumes where it was when it is killed:

```
python recipes/python_stdlib.py --out OUT --tokens {tokens}
python recipes/model_card.py --run OUT
```

The log of that run is `training-log.jsonl`, its curves are `curves.png`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    run = parser.parse_args().run
    ASSET.mkdir(parents=True, exist_ok=True)
    for path in (run / "model").iterdir():
        shutil.copyfile(path, ASSET / path.name)
    shutil.copyfile(run / "curves.png", ASSET / "curves.png")
    shutil.copyfile(run / "log.jsonl", ASSET / "training-log.jsonl")
    (ASSET / "README.md").write_text(card(run), encoding="utf-8")


def card(run: Path) -> str:
    """The model card's text, with this run's figures."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    corpus = json.loads((run / "corpus.json").read_text(encoding="utf-8"))
    config = json.loads((ASSET / "config.json").read_text(encoding="utf-8"))
    scored = perplexity()
    return CARD.format(
        parameters=summary["parameters"],
        context=config["max_position_embeddings"],
        python=corpus["python"],
        num_files=len(corpus["training"]["files"]),
        held_files=len(corpus["held_out"]["files"]),
        megabytes=corpus["training"]["num_bytes"] / 1e6,
        corpus_tokens=corpus["training"]["num_tokens"],
        tokens=summary["tokens"],
        epochs=summary["tokens"] / corpus["training"]["num_tokens"],
        held_out_loss=summary["held_out_loss"],
        bits_per_byte=summary["bits_per_byte"],
        perplexity=scored["perplexity"],
        text_bits=scored["bits_per_byte"],
        file_megabytes=(ASSET / "model.safetensors").stat().st_size / 1e6,
    )


def perplexity() -> dict:
    """What the command line says of the shipped text."""
    command = [sys.executable, "-m", "rooflax", "perplexity", "-f", str(HELD_OUT), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
