"""How long models of full depth compile for an H200 that is not there: generate's two programs, and
all that a server warms up.

    PYTHONPATH=src .venv-gpu/bin/python tools/gpu_start.py [--only NAME ...]

Weights are shapes. Seconds are of the processor, and of the clock. What a second start takes is not
shown, but is not less than lowering: JAX loads no program for a card that is not there.
"""

from __future__ import annotations

import argparse
import sys
import time

import gpu_compile  # first: it says where CUDA is
import gpu_steps

from rooflax.engine.buckets import Buckets

SLOTS = 16
MODELS = (("llama-3.1-8b", None), ("llama-3.1-8b", "w4a16"), ("gpt-oss-20b", "mxfp4-a16"))


def programs(model: str, format: str | None) -> dict[str, list[tuple[str, tuple]]]:
    """By what starts: names of programs and the arguments of `gpu_steps.program`."""

    def one(kind: str, *how: object, greedy: bool = True) -> tuple:
        return (gpu_steps.Step("", model, format, kind, (), greedy), None, *how)

    server = Buckets.of_server(
        SLOTS, gpu_steps.CONTEXT, gpu_steps.CHUNK, reads_in_place=True, pads=True
    )
    kinds = {"step": "prefill", "decode": "decode"}
    every = [("scored", one("scored", 1, greedy=False))]
    every += [
        (str(s), one(kinds[s.kind], s.sequences, s.tokens, greedy=False)) for s in server.shapes()
    ]
    return {"generate": [(kind, one(kind)) for kind in ("prefill", "decode")], "server": every}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    args = parser.parse_args()
    lines = ["| start | programs | lowering | compiling | on the clock |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for model, format in MODELS:
        for start, given in programs(model, format).items():
            label = f"{model} {format or 'bf16'}, {start}"
            if args.only and not any(asked in label for asked in args.only):
                continue
            begin, rows = time.perf_counter(), []
            for name, how in given:
                made = gpu_steps.program(*how)
                rows.append(gpu_compile.compiled(*made, donate_argnums=1)[2])
                sys.stderr.write(f"{label}, {name}: {rows[-1]}\n")
            clock = time.perf_counter() - begin
            sums = [sum(row[k] for row in rows) for k in ("lowering_s", "compiling_s")]
            cells = [len(rows), *(f"{n:.1f} s" for n in (*sums, clock))]
            lines.append(f"| {label} | {' | '.join(map(str, cells))} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
