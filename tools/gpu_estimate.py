"""What a step should take on an H200, from the table of `gpu_compile.py`.

    python tools/gpu_estimate.py

A step reads its weights, and while it reads it multiplies; then each launch costs what the card
needs to begin another kernel. All constants are below and none is fitted: a card can prove the
model wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_docs
from gpu_docs import Table

BYTES_PER_S = 4.3e12
LANES_PER_S = 132 * 128 * 1.98e9
"""Instructions of threads: each multiprocessor issues four a cycle, for 32 threads each."""
LAUNCH_S = 2.1e-6


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


WAYS = {
    "few rows": "llama-3.1-8b w4a16, decode, rows 4",
    "tiles": "llama-3.1-8b w4a16, decode, rows 8",
}
"""Kernels of several rows, and the step that has so many launches."""
FORMATS = {
    "int4": ("w4a16", 4.5), "int8": ("w8a16-g32", 8), "MXFP4": ("mxfp4-a16", 4.25),
    "fp8": ("fp8-a16", 8),
}  # fmt: skip
"""What a weight of each is called in the table, and its bits."""
CYCLES_OF_DP4A = 2


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


def of_several_rows(table: Table) -> list[str]:
    """Of LLaMA 8B, by both kernels, in ms."""
    lines = [f"| rows | {' | '.join(FORMATS)} |", "| --- " * (1 + len(FORMATS)) + "|"]
    for rows in (4, 8):
        cells = []
        for format, bits in FORMATS.values():
            reads = LLAMA * bits / 8 / BYTES_PER_S
            steps = [
                max(reads, LLAMA * cycles(table, format, rows, way) / LANES_PER_S)
                + launched(table, step, 32) * LAUNCH_S
                for way, step in WAYS.items()
            ]
            cells.append(" / ".join(f"{step * 1e3:.2f}" for step in steps))
        lines.append(f"| {rows} | {' | '.join(cells)} |")
    return lines


def cycles(table: Table, format: str, rows: int, way: str) -> float:
    """Of a lane, for a weight. The table has the kernel that rows take under their own name."""
    name = f"linear {format}, rows {8 if way == 'tiles' else rows}"  # a tile has 8 at least
    row = table["kernels"].get(f"{name} by {way}") or table["kernels"][name]
    if way == "tiles" or format == "fp8-a16":
        return row["per_weight"]
    return max(
        row["per_weight"], CYCLES_OF_DP4A * rows * 2 / 4
    )  # two bytes a row, four weights each


def tables(table: Table) -> list[str]:
    """As they stand in docs/gpu.md."""
    parts = of_one_row(table), of_several_rows(table)
    return ["".join(f"{line}\n" for line in lines) for lines in parts]


def main() -> int:
    one, several = tables(gpu_docs.newest())
    sys.stdout.write(f"{one}\n{' / '.join(WAYS)}, ms\n\n{several}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
