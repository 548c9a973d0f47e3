"""Texts per second of an embedding model, beside sentence-transformers on the same texts.

    python benchmarks/embeddings.py FOLDER [--texts 256] [--quantize int8] [--peer]

Texts of 16 to 256 tokens, embedded by `LLM.embed` in float32 and in each format; with --peer, by
sentence-transformers (torch, float32, all threads), which must be installed. Rounds alternate, so
that what else the machine does falls on all alike. Prints the median seconds, texts and tokens per
second, and how far vectors are from float32's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from rooflax import LLM

WORDS = (
    "the", "of", "model", "token", "search", "query", "about", "a", "vector", "house", "running",
    "blue", "document", "language",
)  # fmt: skip


def texts(count: int, longest: int) -> list[str]:
    """Of these words, from 14 of them to as many as give `longest` tokens."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(14, longest - 1, count)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantize", action="append", default=[], help="a format beside float32")
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()

    some = texts(args.texts, args.longest)
    runs: dict[str, Callable[[], np.ndarray]] = {}
    exact = LLM(args.folder, dtype="float32")
    runs["float32"] = partial(exact.embed, some)
    for name in args.quantize:
        runs[name] = partial(LLM(args.folder, quantize=name).embed, some)
    if args.peer:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(args.folder, device="cpu")
        runs["sentence-transformers"] = partial(model.encode, some, show_progress_bar=False)
    first = {name: run() for name, run in runs.items()}  # compiles, and warms up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    tokens = sum(len(exact.encode(text)) for text in some)
    print(f"{len(some)} texts, {tokens} tokens")
    for name, found in seconds.items():
        median = statistics.median(found)
        off = np.abs(first[name] - first["float32"]).max()
        rates = f"{len(some) / median:8.1f} texts/s {tokens / median:9.0f} tokens/s"
        print(f"{name:<24} {median:7.3f} s {rates}   off by {off:.1e}")


if __name__ == "__main__":
    main()
