"""GGUF files of every family, both ways, beside llama.cpp: whether they compute the same.

Tiny checkpoints of random weights (tests/gguf_cases.py). "converted" is the largest difference
between the checkpoint's logits and those of the file that llama.cpp's own converter makes of it,
both read by rooflax. The other columns are files that `rooflax quantize --gguf` writes: how far
llama.cpp's logits of a file are from rooflax's in float32 of the same file, the largest difference
for F32; for the others its root mean square as a share of the logits', in the median of the tokens,
because rounded activations choose another expert for a few, whose logits then differ altogether.
Token ids of every kind of tokenizer must be equal.

    python -m benchmarks.peers.gguf_families --llama-cpp DIR/vendor/llama.cpp --python PEERS/python

PEERS has llama-cpp-python, torch, transformers, sentencepiece and gguf. Prints a Markdown table, or
--json; exits with 1 where something differs by more than it may (`MOST`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rooflax import load
from rooflax.errors import RooflaxError
from rooflax.loading.gguf_save import FILE_TYPES, save_gguf
from rooflax.loading.model_info import model_info
from rooflax.loading.tokenizer import Tokenizer
from rooflax.nn.batch import Batch
from tests import gguf_cases, tokenizer_cases
from tests.make_gguf_fixtures import write_for_converter

HERE = Path(__file__).parent
TOKENS = 41
CONVERTED = "converted"
MOST = {CONVERTED: 1e-4, "F32": 2e-4, "BF16": 0.03, "Q8_0": 0.15, "Q4_0": 0.15}
"""The first two in logits, the others as shares: beside such weights llama.cpp rounds activations,
to bfloat16 and to int8, which random weights amplify and routing to experts makes steps of."""
TABLES = {"gpt2", "gemma3", *gguf_cases.GEMMA4}
"""Whose GELU llama.cpp looks up in a table of float16: F32 may differ by `TABLE_ERROR`."""
TABLE_ERROR = 0.02
CONVERTER: dict[str, dict[str, Any] | None] = {
    "hunyuan": {"rope_theta": 10_000.0, "max_position_embeddings": 32_768},
    "granite4": {
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_n_heads": 6,
        "mamba_d_head": 32,
    },
    "granite4_nope": None,
}
"""What a checkpoint must say for the converter; None where it writes another model, with RoPE."""
AS_LLAMA_CPP = {
    "gpt_oss": {
        "rope_scaling": gguf_cases.family_config("gpt_oss")["rope_scaling"] | {"truncate": True},
    },
    "phi3": {"sliding_window": None},
}  # fmt: skip
"""What llama.cpp computes whatever the file says, which `rooflax quantize` tells."""
FURTHER = ("qwen3_next", "qwen3_5")
"""Families whose converter wants layers that predict further tokens, unless it is told not to."""


def token_ids() -> np.ndarray:
    """[1, TOKENS], none of them special."""
    return np.random.RandomState(3).randint(5, 250, (1, TOKENS)).astype(np.int32)


def our_logits(path: Path) -> np.ndarray:
    """[1, TOKENS, vocab] in float32."""
    model = load(path, dtype="float32")
    hidden, _ = model.forward(Batch.dense(jnp.asarray(token_ids())), None)
    return np.asarray(model.logits(hidden))


def llama_cpp_logits(path: Path, python: str, work: Path) -> np.ndarray:
    np.save(work / "ids.npy", token_ids())
    command = [python, HERE / "llama_cpp_logits.py", path, work / "ids.npy", work / "logits.npy"]
    subprocess.run(command, check=True, capture_output=True)
    return np.load(work / "logits.npy")


def convert(name: str, args: argparse.Namespace, work: Path) -> float | str:
    """How far the converter's file is from its checkpoint."""
    changes = CONVERTER.get(name, {})
    if changes is None:
        return "other model"
    tokenizer = gguf_cases.TOKENIZERS.get(name, "gpt-2")
    changes = gguf_cases.converted_rows(name) | changes
    folder = gguf_cases.write_family(work / "source", name, tokenizer, **changes)
    write_for_converter(folder, name, args.python)
    command = [args.python, HERE / "gguf_files.py", args.llama_cpp, folder, work / "converted"]
    command += ["f32", "--pre", "gpt-2", *(["--no-mtp"] if name.startswith(FURTHER) else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2][:200]
    try:
        found = our_logits(work / "converted.f32.gguf")
    except RooflaxError as error:
        return str(error)
    rows = found.shape[-1]  # fewer where the converter leaves out ids without a token
    return float(np.abs(found - our_logits(folder)[..., :rows]).max())


def write(name: str, args: argparse.Namespace, work: Path) -> dict[str, float | str]:
    """How far llama.cpp's logits of our files are from ours."""
    errors: dict[str, float | str] = {}
    folder = gguf_cases.write_family(work / "tiny", name)
    for kind in FILE_TYPES:
        path = work / f"{kind}.gguf"
        save_gguf(model_info(folder), path, kind)
        try:
            theirs = llama_cpp_logits(path, args.python, work)
        except subprocess.CalledProcessError as error:
            errors[kind] = error.stderr.decode().strip().rpartition("\n")[2][:200] or "not opened"
            continue
        ours = our_logits(path)
        if name in AS_LLAMA_CPP and kind == "F32":
            changed = gguf_cases.write_family(work / "changed", name, **AS_LLAMA_CPP[name])
            ours = our_logits(changed)
        elif name in AS_LLAMA_CPP:
            continue
        error = ours - theirs[..., : ours.shape[-1]]
        shares = np.linalg.norm(error, axis=-1) / np.linalg.norm(ours, axis=-1)
        errors[kind] = float(np.abs(error).max() if kind == "F32" else np.median(shares))
    return errors


def different_ids(name: str, args: argparse.Namespace, work: Path) -> list[str]:
    """Texts of which llama.cpp makes other tokens."""
    family = tokenizer_cases.FAMILIES.get(name, "llama")
    folder = gguf_cases.write_family(work / "tokens", family, name)
    save_gguf(model_info(folder), work / "tokens.gguf", "F32")
    texts, ids = work / "texts.json", work / "ids.json"
    texts.write_text(json.dumps(tokenizer_cases.TEXTS))
    command = [args.python, HERE / "llama_cpp_tokens.py", work / "tokens.gguf", texts, ids]
    subprocess.run(command, check=True, capture_output=True)
    tokenizer = Tokenizer(folder)
    pairs = zip(tokenizer_cases.TEXTS, json.loads(ids.read_text()), strict=True)
    return [text for text, found in pairs if tokenizer.encode(text) != found]


def is_bad(name: str, kind: str, error: float | str) -> bool:
    most = TABLE_ERROR if name in TABLES and kind == "F32" else MOST[kind]
    return error != "other model" and (isinstance(error, str) or not error <= most)


def table(rows: dict[str, dict[str, float | str]], tokens: dict[str, list[str]]) -> str:
    kinds = (CONVERTED, *FILE_TYPES)
    lines = [f"| checkpoint | {' | '.join(kinds)} |", "| --- |" + " ---: |" * len(kinds)]
    for name, row in rows.items():
        cells = [row.get(kind, "") for kind in kinds]
        shown = [f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    count = len(tokenizer_cases.TEXTS)
    lines += ["", "| tokenizer | texts with the same ids |", "| --- | ---: |"]
    lines += [f"| {name} | {count - len(bad)} of {count} |" for name, bad in tokens.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", required=True, help="folder with convert_hf_to_gguf.py")
    parser.add_argument("--python", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument(
        "--families", default=",".join(gguf_cases.FAMILIES), help="'' is the tokenizers alone"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[str, dict[str, float | str]] = {}
    for name in filter(None, args.families.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            rows[name] = {CONVERTED: convert(name, args, work)} | write(name, args, work)
        print(name, rows[name], file=sys.stderr)
    tokens: dict[str, Any] = {}
    for name in (*tokenizer_cases.BYTE_LEVEL, *tokenizer_cases.SENTENCEPIECE):
        with tempfile.TemporaryDirectory() as folder:
            tokens[name] = different_ids(name, args, Path(folder))
    found = {"families": rows, "tokenizers": tokens}
    sys.stdout.write((json.dumps(found, indent=2) if args.json else table(rows, tokens)) + "\n")
    bad = any(is_bad(name, kind, e) for name, row in rows.items() for kind, e in row.items())
    sys.exit(bad or any(tokens.values()))


if __name__ == "__main__":
    main()
