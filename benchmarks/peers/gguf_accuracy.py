"""How near quantised GGUF files of the embedded model come to their own numbers: ours, llama.cpp's.

Teacher-forced on the shipped held-out text. The reference is a float32 evaluation of the
dequantised file, so that what is measured is the arithmetic and not the quantisation. "argmax" is
the share of positions with the reference's most probable token, where its two best logits are more
than 0.05 apart; the errors are of logits less their mean, which a softmax does not see.

    python -m benchmarks.peers.gguf_accuracy --llama-cpp DIR/vendor/llama.cpp --python PEERS/python

PEERS has llama-cpp-python, torch, transformers and gguf. Prints a Markdown table, or --json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import LLM, ExecutionOptions
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.tokenizer import Tokenizer
from rooflax.nn.batch import Batch

HERE = Path(__file__).parent
HELD_OUT = HERE.parents[1] / "tests" / "data" / "python_held_out.txt"
KINDS = ("q8_0", "q4_0", "q4_k_m", "q6_k")
GAP = 0.05


def windows(count: int, tokens: int) -> np.ndarray:
    """[count, tokens] ids spread over the held-out text."""
    ids = Tokenizer(embedded_folder()).encode(HELD_OUT.read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - tokens, count).astype(int)
    return np.array([ids[start : start + tokens] for start in starts], np.int32)


def our_logits(
    path: Path, ids: np.ndarray, options: ExecutionOptions, dtype: str | None = None
) -> tuple[np.ndarray, int]:
    """[windows, tokens, vocab] and the bytes of the weights."""
    model = LLM(path, dtype=dtype, options=options).model

    @jax.jit
    def run(model, row):
        hidden, _ = model.forward(Batch.dense(row), None, options=options)
        return model.logits(hidden, options=options)

    rows = [np.asarray(run(model, jnp.asarray(row[None])))[0] for row in ids]
    return np.stack(rows), model.weights_bytes


def compared(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Shares and errors against the reference."""
    best = np.sort(np.partition(reference, -2, axis=-1)[..., -2:], axis=-1)
    clear = best[..., 1] - best[..., 0] > GAP
    same = found.argmax(-1) == reference.argmax(-1)
    centred = [x - x.mean(-1, keepdims=True) for x in (found, reference)]
    error = centred[0] - centred[1]
    return {
        "argmax": float(same[clear].mean()),
        "rms_error": float(np.sqrt(np.mean(error**2))),
        "max_error": float(np.abs(error).max()),
    }


def formats(path: Path) -> str:
    """Types of the matmuls' tensors, by how many there are."""
    file, counts = GGUFFile(path), {}
    for name in file.names():
        if len(file.info(name).shape) > 1:
            counts[file.info(name).dtype] = counts.get(file.info(name).dtype, 0) + 1
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), key=lambda x: -x[1]))


def measure(
    path: Path, ids: np.ndarray, python: str, work: Path, options: ExecutionOptions
) -> dict[str, Any]:
    reference, _ = our_logits(path, ids, options, dtype="float32")
    ours, weights_bytes = our_logits(path, ids, options)
    np.save(work / "ids.npy", ids)
    command = [python, HERE / "llama_cpp_logits.py", path, work / "ids.npy", work / "logits.npy"]
    subprocess.run(command, check=True)
    theirs = np.load(work / "logits.npy")[..., : reference.shape[-1]]
    return {
        "file": path.name,
        "tensors": formats(path),
        "file_bytes": path.stat().st_size,
        "weights_bytes": weights_bytes,
        "rooflax": compared(ours, reference),
        "llama.cpp": compared(theirs, reference),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| file | products' tensors | engine | argmax | rms error | largest error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        for engine in ("rooflax", "llama.cpp"):
            found = row[engine]
            lines.append(
                f"| {row['file']} | {row['tensors']} | {engine} | {100 * found['argmax']:.2f}% | "
                f"{found['rms_error']:.5f} | {found['max_error']:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", required=True, help="folder with convert_hf_to_gguf.py")
    parser.add_argument("--python", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kernels", help="as for rooflax; default the platform's best")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ids = windows(args.windows, args.tokens)
    kinds = args.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make = [args.python, HERE / "gguf_files.py", args.llama_cpp, embedded_folder()]
        command = [*make, work / "embedded", *kinds, "--pre", "gpt-2"]
        subprocess.run(command, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
        options = ExecutionOptions(kernels=args.kernels)
        rows = [
            measure(work / f"embedded.{kind}.gguf", ids, args.python, work, options)
            for kind in kinds
        ]
    sys.stdout.write((json.dumps(rows, indent=2) if args.json else table(rows)) + "\n")


if __name__ == "__main__":
    main()
