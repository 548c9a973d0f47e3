"""Trains the embedded chat model: the embedded model's first layers, on made-up conversations.

    python recipes/chat.py --out FOLDER [--tokens 3000000]

FOLDER (outside the repository) gets `start/` (the model to go on from, with the tokens and the
template of a chat), `conversations.jsonl`, the run of `rooflax train` and its `model/`. Killed, the
same command goes on where it was. At the end it counts right answers to new conversations, and
with --install puts the model and its card into the package.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from chat_data import EXERCISES, TEMPLATE, Message, conversations, tool_call
from jinja2 import Environment

from rooflax import LLM, load, model_info
from rooflax.loading.save import save_model

ROOT = Path(__file__).resolve().parents[1]
ASSET = ROOT / "src" / "rooflax" / "assets" / "rooflax-chat-5m"
START, END = "<|im_start|>", "<|im_end|>"
NUM_LAYERS = 5
CONTEXT = 512
SEED, TEST_SEED = 0, 1
TOKENS_PER_CONVERSATION = 100
EACH = 100
"""Conversations of each kind that are counted at the end."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--install", action="store_true", help="put it into the package")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "start").exists():
        write_start(args.out / "start")
    data = args.out / "conversations.jsonl"
    if not data.exists():
        write_data(data, args.tokens // TOKENS_PER_CONVERSATION)
    run = args.out / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rooflax", "train", str(args.out / "start")),
            *("--data", str(data), "--out", str(run), "--tokens", str(args.tokens)),
            *("--batch", "8", "--micro-batches", "4", "--seq-len", str(CONTEXT)),
            *("--optimizer", "muon", "--lr", "3e-3", "--warmup-steps", "50"),
            *("--min-lr-ratio", "0.05"),
            *("--held-out-fraction", "0.01", "--eval-batches", "4", "--checkpoint-every", "100"),
        ],
        check=False,
    )
    if done.returncode:
        return done.returncode
    shares = evaluate(run / "model")
    print(json.dumps(shares, indent=1))
    if args.install:
        install(run, shares)
    return 0


def write_start(folder: Path) -> None:
    """The embedded model's first layers; its last two tokens become the marks of a chat."""
    info = model_info()
    model, source = load(info), info.folder
    assert source is not None
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    first = info.config.vocab_size - 2
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: i for text, i in vocab.items() if i < first}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-2]
    mark = {k: v for k, v in tokenizer["added_tokens"][0].items() if k not in ("id", "content")}
    for number, content in enumerate((START, END), start=first):
        tokenizer["added_tokens"].append({"id": number, "content": content, **mark})
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"chat_template": TEMPLATE, "eos_token": END}
    embed = np.array(model.weights["embed"])
    embed[first:] = embed[:first].mean(axis=0)
    layers = model.weights["layers"][:NUM_LAYERS]
    files: dict[str, Path | bytes] = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    save_model(
        folder,
        "llama",
        info.config.first(NUM_LAYERS),
        {**model.weights, "embed": jnp.asarray(embed), "layers": layers},
        dtype="float32",
        eos_token_ids=[first + 1, 0],
        generation={"do_sample": False},
        files=files,
    )


def write_data(path: Path, count: int) -> None:
    """Conversations as the template writes them, a line of JSON each."""
    environment = Environment()
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(TEMPLATE)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for messages, tools in conversations(SEED, count):
            text = template.render(messages=messages, tools=tools or None)
            file.write(json.dumps({"text": text}) + "\n")
    temporary.replace(path)


def evaluate(folder: Path) -> dict[str, float]:
    """The share of last answers, to conversations of one exercise each, that are right in full."""
    llm = LLM(folder)
    asked, right = Counter[str](), Counter[str]()
    for kind, prompt, tools, wanted in questions():
        ids = llm.encode_chat(prompt, tools=tools)
        (found,) = llm.generate([ids], max_tokens=min(160, CONTEXT - len(ids)))
        asked[kind] += 1
        right[kind] += found.text.strip() == wanted.strip()
    return {kind: right[kind] / asked[kind] for kind in asked}


def questions() -> Iterator[tuple[str, list[Message], list[dict[str, Any]] | None, str]]:
    kinds = [*EXERCISES, tool_call]
    for kind in kinds:
        for number in range(EACH):
            exercise = kind(random.Random(f"{TEST_SEED} {kind.__name__} {number}"))
            *prompt, last = exercise.messages
            yield kind.__name__, prompt, exercise.tools or None, last["content"]


CARD = """---
license: apache-2.0
language: [en, code]
library_name: rooflax
tags: [chat, llama]
---

# rooflax-chat-5m

A LLaMA of {parameters:,} parameters (5 layers, width 256, 8 heads over 4 K/V heads, context 512)
that holds a conversation. It is the model of `rooflax chat` where none is named: small enough to
ship, so that a chat, a system message, JSON and tools can be seen without a download.

It goes on from the first five layers of [rooflax-python-5m](../rooflax-python-5m/README.md), with
two tokens replaced by the marks of a chat. It was trained on {tokens:,} tokens of conversations
that `recipes/chat_data.py` makes up; no text comes from elsewhere. `python recipes/chat.py --out
FOLDER` does it all, in a quarter of an hour on two CPU cores.

## What it can do

Right answers, in full, to {each} new questions of each kind, greedy:

| kind | right |
| --- | ---: |
{rows}

## What it cannot do

It knows no facts about the world, and what is unlike its exercises it answers as if it were one of
them. It does not calculate, and says so. It has {context} tokens of context.
"""


def install(run: Path, shares: dict[str, float]) -> None:
    """Puts the run's model and its card into the package."""
    shutil.rmtree(ASSET, ignore_errors=True)
    shutil.copytree(run / "model", ASSET)
    rows = "\n".join(
        f"| {kind.replace('_', ' ')} | {share:.0%} |" for kind, share in shares.items()
    )
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    tokens = max(json.loads(line).get("tokens", 0) for line in lines)
    parameters = load(ASSET).num_parameters
    card = CARD.format(parameters=parameters, tokens=tokens, each=EACH, rows=rows, context=CONTEXT)
    (ASSET / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
