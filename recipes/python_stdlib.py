"""Trains the embedded default model: a small LLaMA on the Python standard library's sources.

    python recipes/python_stdlib.py --out FOLDER [--tokens 12000000 | --minutes 60]

FOLDER (outside the repository) gets the corpus, the tokenizer, checkpoints, `log.jsonl`,
`curves.png`, and at the end `model/`, a Hugging Face folder. Killed, the same command goes on
where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
import time
from pathlib import Path

from tokenizers import Tokenizer

from rooflax.errors import RooflaxError
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.model import Model, build
from rooflax.models.registry import read_config
from rooflax.train.config import TrainConfig
from rooflax.train.corpus import folder_documents, split_held_out
from rooflax.train.data import Corpus, PackedBatch, Rows, encode_texts, open_corpus, write_corpus
from rooflax.train.loop import TrainResult, run_training, write_curves
from rooflax.train.step import init_state, make_optimizer, make_train_step
from rooflax.train.tokenizer_training import (
    END_OF_TEXT,
    save_tokenizer,
    train_tokenizer,
)

VOCAB_SIZE = 4096
TEST_FOLDERS = ("test", "tests", "idle_test")
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MODEL = read_config(CONFIG)[1]
# A model this small repeats itself when it is greedy.
GENERATION = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}

# Small micro-batches: on CPU two rows' intermediates are cheaper to touch than sixteen rows'. Muon
# learns from a token about what AdamW (at 2e-3) learns from two, in steps that take an eighth longer.
TRAINING = TrainConfig(
    tokens=12_000_000,
    batch_size=8,
    seq_len=512,
    micro_batches=4,
    optimizer="muon",
    learning_rate=6e-3,
    warmup_steps=60,
    weight_decay=0.1,
    clip_norm=1.0,
    beta2=0.95,
    eval_every=200,
    eval_batches=4,
    checkpoint_every=200,
)


def main() -> int:
    args = parse_args()
    if Path(__file__).resolve().parents[1] in (
        args.out.resolve(),
        *args.out.resolve().parents,
    ):
        print(
            f"--out {args.out} is inside the repository; choose a folder elsewhere.",
            file=sys.stderr,
        )
        return 2
    try:
        return train(args)
    except RooflaxError as error:
        print(error, file=sys.stderr)
        return 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for everything it writes")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--tokens", type=int, help="tokens to train on (default 12 million)")
    budget.add_argument("--minutes", type=float, help="measure the speed, then fill this time")
    parser.add_argument("--no-tests", action="store_true", help="leave the test suites out")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(args: argparse.Namespace) -> int:
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = prepare_corpus(out, include_tests=not args.no_tests)
    model = build("llama", MODEL, random_weights("llama", MODEL, seed=args.seed), None)
    tokens = settled_tokens(args, model, training)
    config = dataclasses.replace(TRAINING, tokens=tokens, seed=args.seed)
    say(
        f"{model.num_parameters:,} parameters; {config.num_steps} steps of "
        f"{config.tokens_per_step} tokens; corpus {training.info.num_tokens:,} tokens"
    )
    started = time.monotonic()
    result = run_training(model, config, training, held_out, out)
    if result.interrupted:
        say(f"interrupted after step {result.step}; run the same command to go on")
        return 130
    write_curves(out)
    export(out, result, training, held_out)
    say(
        f"done in {(time.monotonic() - started) / 60:.1f} minutes: held-out loss "
        f"{result.held_out_loss:.4f}, {result.bits_per_byte:.4f} bits per byte; {out / 'model'}"
    )
    return 0


def prepare_corpus(out: Path, *, include_tests: bool) -> tuple[Corpus, Corpus]:
    """The tokenizer and the two token files, made once."""
    paths = out / "training.bin", out / "held_out.bin"
    if not (out / "corpus.json").exists():
        folder = Path(sysconfig.get_path("stdlib"))
        skip = () if include_tests else TEST_FOLDERS
        documents = split_held_out(folder_documents(folder, "*.py", skip=skip))
        say(f"{len(documents[0])} files to train on, {len(documents[1])} held out")
        tokenizer = train_tokenizer((d.text for d in documents[0]), VOCAB_SIZE)
        save_tokenizer(tokenizer, out / "tokenizer", model_max_length=MODEL.max_position)
        separator = tokenizer.token_to_id(END_OF_TEXT)
        about = {"python": sys.version.split()[0], "include_tests": include_tests}
        for path, part in zip(paths, documents, strict=True):
            texts = encode_texts((d.text for d in part), tokenizer, separator)
            info = write_corpus(path, texts, VOCAB_SIZE)
            about[path.stem] = dataclasses.asdict(info) | {"files": [d.name for d in part]}
        (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    training, held_out = (open_corpus(path) for path in paths)
    return training, held_out


def settled_tokens(args: argparse.Namespace, model: Model, corpus: Corpus) -> int:
    """The token budget: as given, or from the speed, and the same again when resumed."""
    path = args.out / "budget.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["tokens"]
    tokens = args.tokens or TRAINING.tokens or 0
    if args.minutes:
        tokens = int(args.minutes * 60 * measured_speed(model, corpus))
    path.write_text(json.dumps({"tokens": tokens}) + "\n", encoding="utf-8")
    return tokens


def measured_speed(model: Model, corpus: Corpus) -> float:
    """Tokens per second over a few steps, a twentieth kept back for evaluation."""
    optimizer = make_optimizer(model.table, model.weights, TRAINING)
    state, step = (
        init_state(model.weights, optimizer),
        make_train_step(model, optimizer, TRAINING),
    )
    batch: PackedBatch = Rows(corpus, TRAINING.seq_len).batch(0, TRAINING.batch_size)
    state, _ = step(state, model.rope, batch)
    started = time.monotonic()
    for _ in range(4):
        state, metrics = step(state, model.rope, batch)
    metrics.loss.block_until_ready()
    return 0.95 * 4 * TRAINING.tokens_per_step / (time.monotonic() - started)


def export(out: Path, result: TrainResult, training: Corpus, held_out: Corpus) -> None:
    """The Hugging Face folder, and the numbers for its card."""
    files = {name: out / "tokenizer" / name for name in ("tokenizer.json", "tokenizer_config.json")}
    eos = Tokenizer.from_file(str(files["tokenizer.json"])).token_to_id(END_OF_TEXT)
    save_model(
        out / "model",
        "llama",
        MODEL,
        result.model.weights,
        dtype="bfloat16",
        eos_token_ids=[eos],
        generation=GENERATION,
        files=files,
    )
    summary = {
        "parameters": result.model.num_parameters,
        "steps": result.step,
        "tokens": result.tokens,
        "loss": result.loss,
        "held_out_loss": result.held_out_loss,
        "bits_per_byte": result.bits_per_byte,
        "training_corpus": dataclasses.asdict(training.info),
        "held_out_corpus": dataclasses.asdict(held_out.info),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
