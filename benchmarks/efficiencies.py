"""Measures the table that `rooflax inspect` predicts speeds from, and checks the predictions.

    python benchmarks/efficiencies.py measure --out points.json [--hold] MODEL=FORMAT,FORMAT ...
    python benchmarks/efficiencies.py check points.json ...

`measure` loads everything first, and wants a quiet machine from the moment it says "ready"; with
--hold it measures once for each line of input, and the last counts. `check` predicts each step from
the steps of the other models and prints predicted against measured; with --write these steps become
the package's table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.bench.ceilings import ceiling_reader
from rooflax.bench.measure import Bench, least_seconds
from rooflax.bench.prediction import CONTEXT, PROMPT, TABLE, fit, ideal_of, parameters
from rooflax.bench.trials import run_trials, warm_up
from rooflax.bench.workload import Workload
from rooflax.nn.execution import Precision
from rooflax.ops import native

ROWS, TRIALS, GOAL = (8, 1), 3, 0.15
OUTPUT = 2 * (CONTEXT - PROMPT) + 1
PRECISIONS = {
    "float32": Precision(dtype="float32"),
    "bfloat16": Precision(),
    "int8": Precision(quantize="int8"),
    "int4": Precision(quantize="int4"),
}


def loaded(model: str, format: str) -> list[Bench]:
    """The work at each number of rows, warm, over one copy of the weights."""
    most = Bench(
        Workload(
            model,
            batch=max(ROWS),
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            precision=PRECISIONS[format],
        )
    )
    found = [most.of_batch(rows) for rows in ROWS]
    for bench in found:
        warm_up(bench.run)
    return found


def points(bench: Bench) -> list[dict[str, Any]]:
    """What a step took, and what the ceilings around it allow."""
    read = ceiling_reader(bench.decode.total_bytes, bench.multiplied)
    trials, _ = run_trials(bench.run, read, TRIALS)
    steps = {"decode": bench.decode} | ({"prompts": bench.prefill} if bench.work.batch > 1 else {})
    found = []
    for kind, cost in steps.items():
        least = [least_seconds(cost, t.before, t.after) for t in trials]
        lines = [t.timeline for t in trials]
        found.append(
            {
                "model": str(bench.work.model).removeprefix("preset:"),
                "format": bench.llm.format,
                "kind": f"{kind} {bench.work.batch}",
                "layers": bench.llm.info.config.num_layers,
                "parameters": parameters(bench.llm.info.config),
                "read_s": float(np.median([each["memory"] for each in least])),
                "multiply_s": float(np.median([each["multiply"] for each in least])),
                "s": float(np.median([x.tpot_s if kind == "decode" else x.ttft_s for x in lines])),
            }
        )
    return found


def measure(args: argparse.Namespace) -> None:
    benches = []
    for given in args.models:
        model, _, formats = given.partition("=")
        for format in formats.split(","):
            benches += loaded(model, format)
            print("loaded", model, format, file=sys.stderr, flush=True)
    print("ready", file=sys.stderr, flush=True)
    for _ in sys.stdin if args.hold else [""]:
        found = [point for bench in benches for point in points(bench)]
        table = {native.instruction_set(): found}
        Path(args.out).write_text(json.dumps(table, indent=1))
        print("measured", file=sys.stderr, flush=True)


def check(args: argparse.Namespace) -> None:
    """Predicted against measured, each model by the others."""
    table: dict[str, list[dict[str, Any]]] = {}
    for path in args.files:
        for name, found in json.loads(Path(path).read_text()).items():
            table.setdefault(name, []).extend(found)
    table = {name: fastest(found) for name, found in table.items()}
    for name, found in table.items():
        print(f"{name}: tokens per second, predicted by the other models / measured")
        errors = []
        for kind in dict.fromkeys(point["kind"] for point in found):
            for format in dict.fromkeys(point["format"] for point in found):
                alike = [p for p in found if (p["kind"], p["format"]) == (kind, format)]
                errors += check_alike(alike)
        within = sum(abs(error) <= GOAL for error in errors)
        print(
            f"{within} of {len(errors)} within {GOAL:.0%}; the largest {max(map(abs, errors)):.0%}"
        )
    if args.write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


def fastest(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of repeated measurements of a step the shortest times: other work here only adds to them."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in points:
        known = found.setdefault((point["kind"], point["format"], point["model"]), point)
        known |= {key: min(known[key], point[key]) for key in ("s", "read_s", "multiply_s")}
    return list(found.values())


def check_alike(points: list[dict[str, Any]]) -> list[float]:
    """The errors in one format, printed one a line."""
    errors = []
    for point in points:
        known = fit([p for p in points if p["model"] != point["model"]])
        if known is None:
            continue
        rows = int(point["kind"].split()[1])
        tokens = rows * (PROMPT if point["kind"].startswith("prompts") else 1)
        expected = known.seconds(ideal_of(point), point["layers"])
        errors.append(point["s"] / expected - 1)
        print(
            f"  {point['kind']:10} {point['format']:9} {point['model']:14}"
            f"{tokens / expected:9.1f} /{tokens / point['s']:9.1f} {errors[-1]:+7.1%}"
            f"   ideal {100 * ideal_of(point) / point['s']:3.0f}%"
        )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("measure")
    one.add_argument("models", nargs="+", metavar="MODEL=FORMAT,FORMAT")
    one.add_argument("--out", required=True)
    one.add_argument("--hold", action="store_true")
    one.set_defaults(run=measure)
    two = verbs.add_parser("check")
    two.add_argument("files", nargs="+")
    two.add_argument("--write", action="store_true")
    two.set_defaults(run=check)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
