"""`python -m benchmarks.founding`: measures every table and writes the page."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.founding import forecasts, gpt2, gpt_oss, memory, qwen
from benchmarks.founding.apart import ROOT, apart, say
from benchmarks.founding.plot import plot_curve
from benchmarks.founding.report import document, failures, markdown
from benchmarks.founding.settings import settings

PARTS = {
    "gpt2": gpt2.measure,
    "qwen2.5": qwen.measure,
    "gpt-oss": gpt_oss.measure,
    "memory": memory.measure,
    "forecasts": forecasts.measure,
}
JSON, PAGE = "founding-tables.json", "founding-tables.md"


def main() -> int:
    args = _arguments()
    chosen = settings(smoke=args.smoke, full=args.full)
    environment = apart("about", chosen.gpt2.work(1), "hardware and versions")
    tables, seconds = {}, {}
    for name, measure in PARTS.items():
        say(name)
        start = time.perf_counter()
        tables[name] = measure(chosen)
        seconds[name] = time.perf_counter() - start
    found = document(chosen, environment, tables, seconds)
    _write(args.out or (ROOT / ("build/founding" if args.smoke else "docs")), found)
    for name, wanted in found["wanted"].items():
        sys.stdout.write(f"{name}: {found['totals'][name]:.2f}x, wanted {wanted}x\n")
    missed = failures(found)
    for line in missed:
        say(f"FAILED: {line}")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.founding", description=__doc__)
    parser.add_argument("--full", action="store_true", help="100 tokens of the full shape as well")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, into build/founding")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of docs/")
    return parser.parse_args()


def _write(folder: Path, found: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(markdown(found), encoding="utf-8")
    if not plot_curve(found["tables"]["gpt-oss"]["curve"], folder / gpt_oss.CURVE):
        say("no curve: matplotlib is not installed (pip install matplotlib)")
    say(f"wrote {folder / JSON} and {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
