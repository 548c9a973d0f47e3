"""Figures made by hand, in the shape of measured ones."""

from dataclasses import replace

from rooflax.bench.breakdown import DISPATCH, OTHER
from rooflax.bench.ceilings import Ceiling
from rooflax.bench.counting import StepCost
from rooflax.bench.measure import figures
from rooflax.bench.timeline import Timeline
from rooflax.bench.trials import Trial
from rooflax.ops.parts import PARTS

CEILING = Ceiling(100.0, 1e12, "native", 1 << 29)
XLA = dict.fromkeys(("linear", "attention", "moe"), "xla")
NATIVE = dict.fromkeys(XLA, "native")


def timeline(batch=1, tokens=5, start=10.0, ttft=0.5, step=0.1):
    """A run whose first token comes after `ttft` seconds and the others `step` seconds apart."""
    arrivals = [[start + ttft + step * i for i in range(tokens)] for _ in range(batch)]
    return Timeline(start, arrivals, [tuple(range(tokens)) for _ in range(batch)])


def trial(compilations=0, **changes):
    return Trial(timeline(**changes), compilations, CEILING, CEILING)


def row(work, steps=None):
    """What `measure` gives for a workload, with decode steps of the seconds in `steps`."""
    steps = steps or [0.1] * work.trials
    trials = [trial(batch=work.batch, tokens=work.output_tokens, step=step) for step in steps]
    raw = work.as_json()
    return {
        "model": work.model or "embedded",
        "format": work.precision.dtype or "float32",
        "parameters": 1_000_000,
        "batch": work.batch,
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "options": raw["options"],
        "layers": "unrolled",
        "kernels": XLA,
        "passed_over": [],
        "precision": vars(replace(work.precision, dtype="float32", kv_dtype="float32")),
        "deterministic": work.deterministic,
        "weights_bytes": 4_000_000,
        "kv_cache_bytes": 1_000_000,
        **figures(trials, work, StepCost(4_000_000, 1000, 2_000_000), StepCost(1, 1, 1)),
        "warm_ups": 2,
        "load_s": 0.5,
        "compile_s": 1.5,
        "compilations": 2,
        "compilations_while_timed": 0,
        "void_trials": 0,
        "memory": {
            "anonymous_before_bytes": 1,
            "anonymous_after_bytes": 2,
            "anonymous_peak_bytes": 3,
            "temporary_bytes": 4,
        },
        "peak_rss_bytes": 500_000_000,
        "peak_device_bytes": None,
        "machine": {
            "before": {"load_average": 0.1, "clock_mhz": 2000.0},
            "after": {"load_average": 0.2, "clock_mhz": 2000.0},
        },
        "tokens": [list(tokens) for tokens in trials[0].timeline.tokens],
        "warnings": [],
    }


def measured(work, job="measure"):
    """What `measure_apart` gives for a workload."""
    environment = {"jax": "0.0", "cpu": "a processor"}
    if job == "measure":
        return {"result": row(work), "environment": environment}
    if job == "kernels":
        return {"result": XLA, "environment": environment}
    part = dict.fromkeys((*PARTS, OTHER, DISPATCH), 0.1)
    phases = {name: {"seconds": 1.0, "shares": part} for name in ("prefill", "decode")}
    return {"result": {"model": work.model, "phases": phases}, "environment": environment}
