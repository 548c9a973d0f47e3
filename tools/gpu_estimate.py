"""What a step should take on an H200, from the table of `gpu_compile.py`.

    python tools/gpu_estimate.py

A step reads its weights, and while it reads it multiplies; then each launch costs what beginning,
filling and draining a kernel takes. Both constants are those of the kernels' law (gpu_speed.py),
not fitted to any step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_docs
from gpu_docs import Table
from gpu_speed import LAW

BYTES_PER_S = 1e6 * LAW.bytes_per_us
LANES_PER_S = 132 * 128 * 1.98e9
"""Instructions of threads: each multiprocessor issues four a cycle, for 32 threads each."""
LAUNCH_S = 1e-6 * LAW.launch


@dataclass(frozen=True)
class Model:
    """What a step of one row reads.

    Attributes:
        step: its name in the table.
        kernel: whose instructions a weight takes.
        layers: of the whole model.
        weights: of the matmuls that one token goes through, the head's too.
        bits: of a weight with its part of a scale.
        wanted: share of the memory's speed.
    """

    step: str
    kernel: str
    layers: int
    weights: float
    bits: float
    wanted: float


LLAMA, GPT_OSS = 7.5e9, 3.6e9
MODELS = (
    Model("llama-3.1-8b bf16, decode", "linear bfloat16, rows 1", 32, LLAMA, 16, 0.75),
    Model("llama-3.1-8b w8a16, decode", "linear w8a16-g32, rows 1", 32, LLAMA, 8, 0.65),
    Model("llama-3.1-8b w4a16, decode", "linear w4a16, rows 1", 32, LLAMA, 4.5, 0.50),
    Model("gpt-oss-20b mxfp4-a16, decode", "linear mxfp4-a16, rows 1", 24, GPT_OSS, 4.25, 0.50),
)


def of_one_row(table: Table) -> list[str]:
    lines = ["| step | reads | multiplies | launches | step | share | wanted | launches for it |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        launches = launched(table, model.step, model.layers)
        reads = model.weights * model.bits / 8 / BYTES_PER_S
        multiplies = model.weights * table["kernels"][model.kernel]["per_weight"] / LANES_PER_S
        total = max(reads, multiplies) + launches * LAUNCH_S
        room = reads / model.wanted - max(reads, multiplies)
        cells = [
            f"{reads * 1e3:.2f} ms", f"{multiplies * 1e3:.2f} ms", f"{launches:.0f}",
            f"{total * 1e3:.2f} ms", f"{reads / total:.0%}", f"{model.wanted:.0%}",
            f"{room / LAUNCH_S:.0f}",
        ]  # fmt: skip
        lines.append(f"| {model.step} | {' | '.join(cells)} |")
    return lines


def launched(table: Table, step: str, layers: int) -> float:
    return layers * table["steps"][step]["launches"] + table["steps"][step]["besides"]


def tables(table: Table) -> list[str]:
    """As they stand in docs/gpu.md."""
    return ["".join(f"{line}\n" for line in of_one_row(table))]


def main() -> int:
    sys.stdout.write("".join(tables(gpu_docs.newest())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
