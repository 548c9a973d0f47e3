"""The law of the GPU kernels' speed: measured beside fitted, and what variants should take.

    python tools/gpu_speed.py           every measured kernel, worst first; 1 where one is outside
    python tools/gpu_speed.py --fit     the constants that fit them best, and the second run by
                                        those of the first
    python tools/gpu_speed.py --predict the kernels and variants of today's code, worst first

A kernel is `Work`: what compiling shows of it and its grid (`gpu_work.py`), and how often its loop
turns. A multiprocessor issues the instructions of the programs that it holds, and its tensor cores
multiply, partly at the same time; a warp alone waits for memory, for products and for itself. A
wave of programs takes the longer of both, and waves and the memory's stream overlap. What every
program does before its first load adds to that, and so do launches. `LAW` is fitted to what an H200
measured (tools/gpu_tables/h200-*.json) and has to give each of its kernels within WITHIN.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parent / "gpu_tables"
WORK = TABLES / "work.json"
WITHIN = 0.20
MOST_OVERLAP = 8.0
MULTIPROCESSORS, CYCLES_PER_S = 132, 1.98e9
CYCLE = 1e6 / CYCLES_PER_S
"""In microseconds."""
SCHEDULERS = 4
"""Of a multiprocessor: each issues one instruction of a warp a cycle."""
READ_BYTES_PER_US, FLOPS_PER_S = 4.164e6, 773e12
"""Ceilings as measured on the same card, the second of bfloat16."""


@dataclass(frozen=True)
class Work:
    """One launch of a kernel of ours.

    Attributes:
        programs: of the grid that have something to do.
        warps: of a program.
        held: programs that a multiprocessor holds.
        head: instructions of a warp before its first load of weights or keys.
        turns: of the loop.
        body: instructions of a warp in a turn.
        slow: of these, how many take a scheduler's multiplier twice as long (dp4a).
        accesses: of these, how many load from global memory.
        loads: memory latencies of a turn that follow one another.
        waits: for products of the tensor cores in a turn.
        meets: barriers of a turn; `first` are those of the head, and `last` those behind the loop.
        tail: instructions of a warp behind the loop.
        flops: of the tensor cores in a turn of a program.
        nbytes: read from memory, of all programs.
    """

    programs: float
    warps: int
    held: int
    head: float = 0.0
    turns: float = 1.0
    body: float = 0.0
    slow: float = 0.0
    accesses: float = 0.0
    loads: float = 0.0
    waits: float = 0.0
    meets: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tail: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Law:
    """Constants, in microseconds where nothing else is said.

    Attributes:
        launch: a kernel's beginning, its first load and its end.
        other: the same of a small kernel of XLA.
        bytes_per_us: of the memory's stream.
        issue: share of its cycles in which a scheduler with enough warps issues.
        access: cycles of a scheduler that a load from global memory takes besides its own.
        alone: instructions of one warp in a cycle.
        latency: of memory.
        product: wait for products of the tensor cores.
        meet: of a program's warps, at a barrier.
        together: share of the shorter of issue and tensor cores that does not overlap.
        overlap: power of the norm by which waves and the stream add.
    """

    launch: float = 3.06
    other: float = 2.42
    bytes_per_us: float = 3430000.0
    issue: float = 0.733
    access: float = 3.76
    alone: float = 0.783
    latency: float = 0.469
    product: float = 0.00398
    meet: float = 0.0423
    together: float = 0.473
    overlap: float = 5.85

    def kernel(self, work: Work) -> float:
        """Microseconds of one launch."""
        waves, stream = self.waves(work), work.nbytes / self.bytes_per_us
        both = (waves**self.overlap + stream**self.overlap) ** (1 / self.overlap)
        return self.launch + self.head(work) + both

    def head(self, work: Work) -> float:
        """Of all programs before their first load."""
        held = min(work.programs / MULTIPROCESSORS, work.held)
        issue = held * work.warps * work.head * CYCLE / (SCHEDULERS * self.issue)
        alone = work.head * CYCLE / self.alone + work.first * self.meet
        return max(issue, alone) * max(1.0, work.programs / (MULTIPROCESSORS * work.held))

    def waves(self, work: Work) -> float:
        """Of programs behind their heads, without the stream."""
        own = work.turns * work.body + work.tail
        more = work.turns * (work.slow + self.access * work.accesses)
        loads = work.turns * work.loads * self.latency
        waits = work.turns * (work.waits * self.product + work.meets * self.meet)
        waits += work.last * self.meet
        multiply = work.turns * work.flops * 1e6 * MULTIPROCESSORS / FLOPS_PER_S
        total, left = 0.0, work.programs
        while left > 0:
            held = min(work.held, math.ceil(left / MULTIPROCESSORS))
            issue = held * work.warps * (own + more) * CYCLE / (SCHEDULERS * self.issue)
            products = held * multiply
            busy = max(issue, products) + self.together * min(issue, products)
            alone = own * CYCLE / self.alone + loads + waits + multiply / (work.warps / 4)
            hidden = loads / held + waits / (held * work.warps / 4)
            total += max(busy + hidden, alone)
            left -= held * MULTIPROCESSORS
        return total

    def seconds(self, launches: Iterable[Work], others: float = 0.0) -> float:
        return 1e-6 * (sum(map(self.kernel, launches)) + others * self.other)


LAW = Law()


@dataclass(frozen=True)
class Measured:
    """Attributes:
    run: which of the card's runs.
    us: microseconds.
    others: launches of XLA that the timing contains.
    """

    name: str
    run: str
    us: float
    launches: tuple[Work, ...]
    others: float

    def fitted(self, law: Law) -> float:
        return 1e6 * law.seconds(self.launches, self.others)


def measured() -> list[Measured]:
    rows = []
    for path in sorted(TABLES.glob("h200-*.json")):
        for row in json.loads(path.read_text()):
            works = tuple(Work(**work) for work in row["launches"])
            rows.append(Measured(row["name"], row["run"], row["us"], works, row["others"]))
    return rows


def fit(rows: list[Measured], law: Law, trials: int = 6000) -> Law:
    """Least errors, the largest counting most: random steps, ever smaller, that improve it."""

    def worst(law: Law) -> float:
        errors = (math.log(row.fitted(law) / row.us) for row in rows)
        return sum(error**8 for error in errors)

    rng, best = random.Random(0), worst(law)
    for trial in range(trials):
        size = 0.4 * (1 - trial / trials) + 0.01
        moved = {
            field.name: getattr(law, field.name) * math.exp(rng.gauss(0, size))
            for field in fields(law)
            if rng.random() < 0.4
        }
        tried = replace(law, **moved)
        shares = tried.issue, tried.together, tried.alone, tried.overlap / MOST_OVERLAP
        if max(shares) <= 1 and (found := worst(tried)) < best:
            law, best = tried, found
    return law


def of_first_run(rows: list[Measured]) -> Law:
    """A law that has not seen the second run."""
    return fit([row for row in rows if row.run == "first"], LAW)


def table(rows: list[Measured], law: Law) -> list[str]:
    lines = ["| kernel | run | measured, us | fitted, us | fitted / measured |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: -abs(math.log(row.fitted(law) / row.us))):
        fitted = row.fitted(law)
        lines.append(
            f"| {row.name} | {row.run} | {row.us:.1f} | {fitted:.1f} | {fitted / row.us:.2f} |"
        )
    return lines


def outside(rows: list[Measured], law: Law) -> list[str]:
    return [row.name for row in rows if abs(row.fitted(law) / row.us - 1) > WITHIN]


def predicted(law: Law, flops_per_s: float = FLOPS_PER_S) -> list[tuple[str, float, float]]:
    """Microseconds of today's kernels and of what they take to read alone, by what is worst.

    Args:
        flops_per_s: of another card's tensor cores.
    """
    rows, slower = [], FLOPS_PER_S / flops_per_s
    for row in json.loads(WORK.read_text()):
        works = [Work(**{**work, "flops": slower * work["flops"]}) for work in row["launches"]]
        read = sum(work.nbytes for work in works) / READ_BYTES_PER_US
        rows.append((row["name"], 1e6 * law.seconds(works, row["others"]), read))
    return sorted(rows, key=lambda row: -row[1] / max(row[2], 1.0))


def predicted_by(ceilings: dict[str, Any] | None) -> dict[str, float]:
    """Microseconds of today's kernels by their names.

    Args:
        ceilings: as `benchmarks/gpu.py` reads them on a card; None is the card of the fit.
    """
    if ceilings is None:
        return {name: us for name, us, _ in predicted(LAW)}
    read = 1e3 * ceilings["read_gb_per_s"] / READ_BYTES_PER_US
    law = replace(LAW, bytes_per_us=read * LAW.bytes_per_us)
    return {name: us for name, us, _ in predicted(law, ceilings["flops_per_s"]["bfloat16"])}


def predictions(rows: list[tuple[str, float, float]]) -> list[str]:
    lines = ["| kernel, and another answer | predicted, us | reading alone, us |"]
    lines.append("| --- | --- | --- |")
    return lines + [f"| {name} | {us:.1f} | {read:.1f} |" for name, us, read in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="the constants that fit best")
    parser.add_argument("--predict", action="store_true", help="today's kernels and variants")
    args = parser.parse_args()
    rows, law = measured(), LAW
    if args.predict:
        sys.stdout.write("\n".join(predictions(predicted(law))) + "\n")
        return 0
    if args.fit:
        law = fit(rows, law)
        sys.stdout.write(f"{law}\n")
        held_out = [row for row in rows if row.run == "second"]
        sys.stdout.write("The second run by a law that is fitted to the first alone:\n")
        sys.stdout.write("\n".join(table(held_out, of_first_run(rows))) + "\n")
    sys.stdout.write("\n".join(table(rows, law)) + "\n")
    wrong = outside(rows, law)
    sys.stdout.write("".join(f"OUTSIDE {name}\n" for name in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
