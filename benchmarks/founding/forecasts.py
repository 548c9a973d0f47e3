"""What the founding documents forecast, beside what was measured here or why nothing was."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.founding import text
from benchmarks.founding.apart import apart
from benchmarks.founding.settings import PLAIN, Settings
from rooflax.nn.execution import Precision

LAYERS = ("unrolled", "scan")
FORMATS = ("int8", "int4")
ATTENTION = "the kernels of attention and of the matrix products are switched together"


def measure(settings: Settings) -> dict[str, Any]:
    """Compile time of a decode step with both kinds of layers, and the speed of both."""
    found: dict[str, Any] = {"compile": {kind: [] for kind in LAYERS}, "cells": {}}
    for _ in range(settings.processes):
        for kind in LAYERS:
            work = settings.gpt2.work(1, layers=kind, **PLAIN)
            found["compile"][kind].append(apart("compile_step", work, f"compile, layers {kind}"))
    for kind in LAYERS:
        work = settings.gpt2.work(settings.trials, layers=kind, **PLAIN)
        found["cells"][kind] = apart("cell", work, f"decode, layers {kind}")
    found["default"] = apart("cell", settings.gpt2.work(settings.trials), "default settings")
    found["quantised"] = {name: _quantised_cell(settings, name) for name in FORMATS}
    return found


def _quantised_cell(settings: Settings, name: str) -> dict[str, Any]:
    """Its tokens may be others than those of float32."""
    precision = Precision("float32", quantize=name)
    work = replace(settings.gpt2.work(settings.trials), precision=precision)
    return apart("quantised", work, f"default settings, {name} weights")


def markdown(
    found: dict[str, Any], environment: dict[str, Any], baseline: dict[str, Any], model: str
) -> str:
    """The table.

    Args:
        baseline: the first row of GPT-2's table.
    """
    head = ("forecast", "theirs", "here")
    rows = [
        ("scan over layers", "10 to 20% faster compilation", _scan(found["compile"])),
        ("flash attention", "+20 to 30%", f"not measured: {ATTENTION}"),
        ("quantisation", "+50 to 100%", _quantised(found["quantised"], found["default"])),
        ("several devices", "2x to 4x", f"not measured: {_devices(environment)}"),
    ]
    unrolled, scan = (text.median(found["cells"][kind], "decode_tok_per_s") for kind in LAYERS)
    trials = len(found["cells"]["scan"]["decode_tok_per_s"]["trials"])
    sentences = [
        (
            f"Compile figures are medians over {len(found['compile']['scan'])} fresh processes per "
            f"kind, of `{model}` in plain JAX, with the compile cache off."
        ),
        (
            f"Compilation is paid once and kept on disk; decoding with scanned layers runs at "
            f"{text.number(scan)} tok/s against {text.number(unrolled)} unrolled ({trials} trials "
            f"each), {text.times(scan / unrolled)} as fast."
        ),
        *(
            (
                f"With {name} weights, whose tokens may differ, all tokens come "
                f"{text.times(text.median(cell) / text.median(baseline))} as fast as in the first "
                f"row of the table of `{model}`; theirs had INT8 weights."
            )
            for name, cell in found["quantised"].items()
            if "refused" not in cell
        ),
    ]
    return "\n\n".join(["## Their forecasts", text.table(head, rows), text.bullets(sentences)])


def _scan(runs: dict[str, list[dict[str, float]]]) -> str:
    unrolled, scan = (
        median(run["trace_s"] + run["compile_s"] for run in runs[kind]) for kind in LAYERS
    )
    less = 1 - scan / unrolled
    outcome = f"{less:.0%} less" if less >= 0 else f"{-less:.0%} more"
    return (
        f"{outcome} time to trace and compile a decode step: {text.duration(unrolled)} unrolled, "
        f"{text.duration(scan)} scanned"
    )


def _quantised(found: dict[str, dict[str, Any]], default: dict[str, Any]) -> str:
    """What each format adds to the speed of later tokens, or why it was refused."""
    parts = []
    for name, cell in found.items():
        if "refused" in cell:
            parts.append(f"{name} not measured: {cell['refused'].rstrip('.')}")
            continue
        more = _ratio(cell, default) - 1
        speed = text.spread(cell, "decode_tok_per_s")
        parts.append(f"{name} {more:+.0%}, {speed} later tok/s")
    return "; ".join(parts) + f"; float32 {text.spread(default, 'decode_tok_per_s')}"


def _ratio(cell: dict[str, Any], default: dict[str, Any]) -> float:
    return text.median(cell, "decode_tok_per_s") / text.median(default, "decode_tok_per_s")


def _devices(environment: dict[str, Any]) -> str:
    if environment["num_devices"] == 1:
        return f"this machine has one device ({environment['device']})"
    return f"{environment['num_devices']} devices are here, and this command uses one of them"
