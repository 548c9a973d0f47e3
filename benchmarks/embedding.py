"""Texts a second of an embedding model beside other engines, interleaved.

    python benchmarks/embedding.py --model ./all-MiniLM-L6-v2 --peers build/peers/venv/bin/python \
        --gguf float32=MiniLM-F32.gguf --gguf q8_0=MiniLM-Q8_0.gguf [--rounds 5] [--json FILE]

Texts of 16 to 256 tokens. Every engine and format is a process of its own, which stands still while
another works; a round asks each once. `--peers` has torch, transformers, openvino and llama_cpp
(benchmarks/peers/install.sh), the running Python has sentence-transformers, and llama.cpp's
convert_hf_to_gguf.py makes the files. A row says the least cosine of its vectors with those of
sentence-transformers in float32. rooflax's best format, and its float32, are compared with the best
of the others whose cosines are 0.999 or more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
LENGTHS, LEAST_COSINE = (16, 256), 0.999
BATCH = 32
"""Texts that engines without batches of their own get at once, as sentence-transformers does."""
WORDS = (
    "house",
    "river",
    "stone",
    "light",
    "paper",
    "music",
    "winter",
    "garden",
    "letter",
    "window",
)
Embed = Callable[[Sequence[str]], np.ndarray]


def texts(count: int) -> list[str]:
    """One word a token; two more are the tokenizer's."""
    shortest, longest = LENGTHS
    lengths = [shortest + i * 97 % (longest - shortest + 1) - 2 for i in range(count)]
    return [
        " ".join(WORDS[(i + k * k) % len(WORDS)] for k in range(n)) for i, n in enumerate(lengths)
    ]


# ---- Engines, each in its own process ----


def rooflax(model: str, format: str, threads: int) -> Embed:
    from rooflax import LLM

    options: dict[str, Any] = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
    return LLM(model, **options.get(format, {"quantize": format})).embed


def sentence_transformers(model: str, format: str, threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu")
    loaded = loaded.bfloat16() if format == "bfloat16" else loaded
    return lambda several: np.asarray(loaded.encode(list(several), batch_size=BATCH), np.float32)


def openvino(model: str, format: str, threads: int) -> Embed:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    example = dict(tokenizer(["a b", "c"], return_tensors="pt", padding=True))
    with torch.no_grad():
        module = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
        converted = ov.convert_model(module, example_input=example)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = ov.Core().compile_model(converted, "CPU", settings)

    def embed(several: Sequence[str]) -> np.ndarray:
        order = np.argsort([-len(text) for text in several], kind="stable")
        found = np.zeros((len(several), 384), np.float32)
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            inputs = tokenizer(
                [several[i] for i in chosen], padding=True, truncation=True, max_length=LENGTHS[1],
                return_tensors="np",
            )  # fmt: skip
            hidden = compiled({name: inputs[name] for name in example})[0]
            mask = inputs["attention_mask"][..., None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            found[chosen] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return found

    return embed


def llama_cpp(model: str, format: str, threads: int) -> Embed:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    loaded = Llama(
        model, embedding=True, n_ctx=2048, n_batch=2048, n_ubatch=2048, n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    return lambda several: np.asarray(loaded.embed(list(several), normalize=True), np.float32)


ENGINES = {
    "rooflax": rooflax,
    "sentence-transformers": sentence_transformers,
    "OpenVINO": openvino,
    "llama.cpp": llama_cpp,
}


def serve(engine: str, model: str, format: str, threads: int, count: int) -> None:
    """Answers a line for a line; the first says that it is ready, the others the seconds."""
    out = sys.stdout
    sys.stdout = sys.stderr  # of libraries that print
    try:
        embed = ENGINES[engine](model, format, threads)
        embed(texts(count))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return
    print(json.dumps({"engine": engine}), file=out, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        vectors = embed(texts(count))
        seconds = time.perf_counter() - began
        if path := json.loads(line).get("vectors"):
            np.save(path, vectors)
        print(json.dumps({"seconds": seconds}), file=out, flush=True)


# ---- The comparison ----


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--peers", help="their Python; without it sentence-transformers alone")
    parser.add_argument("--gguf", action="append", default=[], metavar="FORMAT=FILE")
    parser.add_argument("--formats", default="float32,bfloat16,int8", help="rooflax's")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--format", default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve(args.engine, args.model, args.format, args.threads, args.texts)
        return 0
    rows = measured(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return report(rows, args.texts)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per engine and format that could be opened, with the seconds of each round."""
    from engine_process import (  # pyright: ignore[reportMissingImports]
        EngineFailed,
        EngineProcess,
        timed,
    )

    wanted = [("rooflax", name, sys.executable, args.model) for name in args.formats.split(",")]
    wanted.append(("sentence-transformers", "float32", sys.executable, args.model))
    if args.peers:
        wanted.append(("OpenVINO", "float32", args.peers, args.model))
        pairs = (each.partition("=") for each in args.gguf)
        wanted += [("llama.cpp", name, args.peers, file) for name, _, file in pairs]
    threads = str(args.threads)
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC"), threads)
    processes, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for engine, format, python, model in wanted:
            command = [python, __file__, "--model", model, "--engine", engine, "--format", format]
            command += ["--threads", threads, "--texts", str(args.texts)]
            log = Path(folder) / "log"
            try:
                process = EngineProcess(engine, command, limits, log)
            except EngineFailed as error:
                print(f"left out: {engine} {format}: {error}", file=sys.stderr)
                continue
            processes.append(process)
            rows.append({"engine": engine, "format": format, "seconds": []})
        path = Path(folder) / "vectors.npy"
        for process, row in zip(processes, rows, strict=True):
            process.ask(vectors=str(path))
            row["vectors"] = np.load(path)
        of = {(row["engine"], row["format"]): row["vectors"] for row in rows}
        wanted_vectors = of["sentence-transformers", "float32"]
        for row in rows:
            row["least_cosine"] = float(np.min(np.sum(row.pop("vectors") * wanted_vectors, axis=1)))
        for number in range(args.rounds):
            turn = list(zip(processes, rows, strict=True))
            for process, row in turn if number % 2 == 0 else reversed(turn):
                row["seconds"].append(timed(process, processes, process.ask)["seconds"])
        for process in processes:
            process.close()
    return rows


def report(rows: list[dict[str, Any]], count: int) -> int:
    """Prints the table and both ratios."""
    print("| engine | format | texts/s | least cosine |\n| --- | --- | --- | --- |")
    for row in rows:
        speed = count / median(row["seconds"])
        print(f"| {row['engine']} | {row['format']} | {speed:.0f} | {row['least_cosine']:.5f} |")
    fits = [row for row in rows if row["least_cosine"] >= LEAST_COSINE]
    ours = [row for row in fits if row["engine"] == "rooflax"]
    others = [row for row in fits if row["engine"] != "rooflax"]

    def ratio(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
        """The median over rounds of the best of each."""
        best = [np.min([row["seconds"] for row in side], axis=0) for side in (theirs, mine)]
        return float(np.median(best[0] / best[1]))

    plain = [[row for row in side if row["format"] == "float32"] for side in (ours, others)]
    print(f"\nbest formats: {ratio(ours, others):.2f}x of the best of the others")
    print(f"float32: {ratio(*plain):.2f}x of the best of the others")
    return 0


if __name__ == "__main__":
    sys.exit(main())
