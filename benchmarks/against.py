"""Single requests, warm-up and memory against another checkout of rooflax, interleaved in one run.

    python benchmarks/against.py CHECKOUT [--model preset:gpt2] [--formats none int8 int4 mxfp4]
        [--rows 1 8] [--prompt-tokens 64 512] [--pairs 9] [--json FILE]
    python benchmarks/against.py CHECKOUT --warm-up [--model preset:gpt2] [--formats int8]

CHECKOUT is a folder with `src/rooflax`, its native library built beside it. Each side runs in a
process of its own, and requests alternate between them. Of every combination: the seconds of
`LLM.generate` for all rows, whole; the ratio is the other checkout's over ours, so above 1 is
faster. Exits with 1 if the 99% interval of a ratio lies below 0.98. With --warm-up, theirs first:
seconds until `AsyncLLM` is ready on an empty compilation cache and on a full one, its programs, and
anonymous memory; exits with 1 if ours are more, by 5% of the seconds or 2% of the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

LEAST_RATIO = 0.98
MORE_SECONDS, MORE_BYTES = 1.05, 1.02
OUTPUT_TOKENS = 32
PRELUDE = """
import sys
if sys.argv[1]:  # an editable install would come before any path
    sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
    sys.path.insert(0, sys.argv[1])
import rooflax
assert rooflax.__file__.startswith(sys.argv[1]), rooflax.__file__
"""
WORKER = """
import json, sys, time
import numpy as np
from rooflax import LLM, SamplingParams
made = {}
for line in sys.stdin:
    model, format, rows, tokens, output = json.loads(line)
    key = model, format
    if key not in made:
        made.clear()
        made[key] = LLM(model, quantize=format, max_model_len=1024)
    llm = made[key]
    vocab = llm.model.config.vocab_size
    prompts = np.random.default_rng().integers(0, vocab, (rows, tokens)).tolist()
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    print(json.dumps(time.perf_counter() - start), flush=True)
"""
WARM_UP = """
import asyncio, json, sys, time
import jax, jax.numpy as jnp
from rooflax import AsyncLLM, SamplingParams
from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes
jax.jit(lambda x: x + 1)(jnp.zeros(4)).block_until_ready()
baseline = anonymous_bytes()

async def main():
    start = time.perf_counter()
    async with AsyncLLM(sys.argv[2], quantize=sys.argv[3] or None, max_model_len=1024) as llm:
        seconds = time.perf_counter() - start
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        await llm.generate([5, 6, 7, 8], params)
        programs = llm.warm_up_report if hasattr(llm, "warm_up_report") else llm.manifest
        found = {"seconds": seconds, "programs": len(programs),
                 "anonymous_bytes": anonymous_bytes() - baseline}
    print(json.dumps(found))

asyncio.run(main())
"""


def command(program: str, checkout: Path | None, *arguments: str) -> list[str]:
    """Of a child that imports rooflax from a checkout; None is the installed one."""
    source = str(checkout / "src") if checkout else ""
    return [sys.executable, "-c", PRELUDE + program, source, *arguments]


class Side:
    """A process that runs requests of one checkout."""

    def __init__(self, checkout: Path | None):
        self._process = subprocess.Popen(
            command(WORKER, checkout), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, *work: Any) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([*work, OUTPUT_TOKENS]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def single_requests(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    from rooflax.bench.figures import paired_ratio

    theirs, ours = Side(args.checkout), Side(None)
    rows, passed = [], True
    for work in product(args.model, args.formats, args.rows, args.prompt_tokens):
        for side in (theirs, ours):  # compiles
            side.seconds(*work)
        pairs = []
        for pair in range(args.pairs):
            order = (theirs, ours) if pair % 2 else (ours, theirs)
            taken = {id(side): side.seconds(*work) for side in order}
            pairs.append((taken[id(ours)], taken[id(theirs)]))
        ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
        passed &= ratio.high >= LEAST_RATIO
        names = ("model", "format", "rows", "prompt_tokens")
        rows.append(
            dict(zip(names, work, strict=True))
            | {"seconds": median(a for a, _ in pairs), "ratio": ratio.ratio}
            | {"low": ratio.low, "high": ratio.high}
        )
        print(
            f"{work[0]:<22} {work[1] or 'none':<6} {work[2]:>2} rows {work[3]:>4} tokens "
            f"{rows[-1]['seconds']:8.3f} s  {ratio.ratio:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]",
            file=sys.stderr,
            flush=True,
        )
    return {"rows": rows}, passed


def warm_up(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    def start(checkout: Path | None, cache: str, model: str, format: str | None) -> dict[str, Any]:
        env = os.environ | {"XDG_CACHE_HOME": cache}
        child = command(WARM_UP, checkout, model, format or "")
        done = subprocess.run(child, check=True, capture_output=True, text=True, env=env)
        return json.loads(done.stdout.splitlines()[-1])

    found, passed = [], True
    for model, format in product(args.model, args.formats):
        row: dict[str, Any] = {"model": model, "format": format}
        for name, checkout in (("theirs", args.checkout), ("ours", None)):
            with tempfile.TemporaryDirectory() as cache:
                cold = start(checkout, cache, model, format)
                warm = [start(checkout, cache, model, format) for _ in range(3)]
            row[name] = cold | {
                "cold_s": cold["seconds"],
                "warm_s": median(w["seconds"] for w in warm),
                "anonymous_bytes": median(w["anonymous_bytes"] for w in warm),
            }
        a, b = row["ours"], row["theirs"]
        passed &= a["programs"] <= b["programs"]
        passed &= all(a[key] <= MORE_SECONDS * b[key] for key in ("cold_s", "warm_s"))
        passed &= a["anonymous_bytes"] <= MORE_BYTES * b["anonymous_bytes"]
        found.append(row)
    return {"rows": found}, passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--model", nargs="+", default=["preset:gpt2"])
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4", "mxfp4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.checkout = args.checkout.resolve()
    args.formats = [None if format == "none" else format for format in args.formats]
    found, passed = warm_up(args) if args.warm_up else single_requests(args)
    text = json.dumps(found | {"passed": passed}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
