"""The tables of the seed documents of this project, each measured again on this machine.

    python -m benchmarks.founding                     writes docs/founding-tables.json and .md
    python -m benchmarks.founding --smoke --out DIR   tiny shapes, to try the script
    python -m benchmarks.founding --render            writes the page from the saved figures

Every figure comes from a process of its own without a persistent compile cache. The slowest rows
bypass the engine on purpose: it pads to a few shapes, so it cannot show what a program for every
length costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rooflax
from rooflax import ExecutionOptions, Model
from rooflax.bench.ceilings import Ceiling, ceiling_reader
from rooflax.bench.counting import decode_cost, prefill_cost
from rooflax.bench.environment import environment
from rooflax.bench.measure import Bench, check_output, median_share
from rooflax.bench.statistics import Summary
from rooflax.bench.timeline import Timeline
from rooflax.bench.trials import Job, ReadCeiling, Trial, run_trials, warm_up
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.engine.runner import SMALLEST_CONTEXT, bucket
from rooflax.loading.model_info import model_info
from rooflax.nn.batch import Batch
from rooflax.nn.execution import Precision
from rooflax.nn.storage import Storage

ROOT = Path(__file__).resolve().parents[1]
WANTED = {"gpt2": 16.32, "qwen2.5": 3.98, "gpt-oss": 60.0}
"""The totals of the seed documents, which the default settings must reach."""

PLAIN: dict[str, Any] = {"kernels": "xla"}
BASELINE: dict[str, Any] = {**PLAIN, "use_cache": False, "jit": False}
SLOWEST: dict[str, Any] = {**BASELINE, "gqa": "repeat", "moe": "per_token"}
OLD, NEW = "old method", "new method"
LATER = "decode_tok_per_s"

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model, and the tokens of its table."""

    model: str
    prompt_tokens: int
    output_tokens: int

    def work(self, trials: int, quantize: str | None = None, **options: Any) -> Workload:
        """A row of this shape in float32 on one device."""
        return Workload(
            self.model,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            trials=trials,
            options=ExecutionOptions(**options),
            precision=Precision("float32", quantize=quantize),
        )


@dataclass(frozen=True)
class Settings:
    """One run of everything.

    Attributes:
        contexts: tokens of prompt and output of the curve; context_output: its output tokens.
        trials: of jitted rows; eager_trials: of rows without jit.
        processes: new processes per side where compilation is timed.
    """

    gpt2: Shape = Shape("preset:gpt2", 4, 15)
    qwen: Shape = Shape("preset:qwen2.5-tiny", 5, 20)
    qwen_full: Shape = Shape("preset:qwen2.5-0.5b", 5, 50)
    gpt_oss: Shape = Shape("preset:gpt-oss-tiny", 32, 8)
    contexts: tuple[int, ...] = (64, 256, 1024, 2048)
    context_output: int = 16
    trials: int = 5
    eager_trials: int = 3
    processes: int = 3


SMOKE = Settings(
    gpt2=Shape("preset:gpt2-tiny", 4, 4),
    qwen=Shape("preset:qwen2.5-tiny", 5, 6),
    qwen_full=Shape("preset:qwen2.5-tiny", 5, 3),
    gpt_oss=Shape("preset:gpt-oss-tiny", 3, 2),
    contexts=(64,),
    context_output=3,
    trials=2,
    eager_trials=1,
    processes=1,
)


def counted(shape: Shape, padded_to: int | None = None, *, later: bool = False) -> list[float]:
    """Operations and bytes without a cache over those with one: what it can bring at most.

    Args:
        padded_to: tokens of every step without a cache; None is as many as there are.
        later: only tokens after the first.
    """
    info = model_info(shape.model)
    float32: Any = {"batch": 1, "storage": Storage("float32"), "kv_dtype": "float32"}
    whole = partial(prefill_cost, info.family, info.config, **float32)
    one = partial(decode_cost, info.family, info.config, **float32)
    prompt, new = shape.prompt_tokens, range(shape.output_tokens)
    uncached = [whole(prompt=padded_to or prompt + n) for n in new][later:]
    cached = [whole(prompt=prompt), *(one(context=prompt + n) for n in new[1:])][later:]
    return [
        sum(cost.operations for cost in uncached) / sum(cost.operations for cost in cached),
        sum(cost.total_bytes for cost in uncached) / sum(cost.total_bytes for cost in cached),
    ]


# Jobs, each in a process of its own.


def apart(job: str, work: Workload, label: str) -> Row:
    """What `JOBS[job]` gives in a new process, and the row's label.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.founding", "--job", job],
        input=json.dumps(work.as_json()),
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", **os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        end = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"{label}: exit status {done.returncode}\n{end}")
    sys.stderr.write(f"  {time.perf_counter() - start:6.1f} s  {label}\n")
    return {"label": label, **json.loads(done.stdout)}


def cell(work: Workload) -> Row:
    """The engine: its first run, which compiles, and its warm trials."""
    bench = Bench(work)
    read = ceiling_reader(bench.decode.total_bytes, bench.multiplied)
    found, trials = _cold_and_warm(bench.run, work, read)
    lines = [trial.timeline for trial in trials]
    if work.options.jit:  # rows without jit have the tokens of a jitted one, which is checked
        check_output(lines, work, bench.llm)
    share = median_share(trials, [line.tpot_s for line in lines], bench.decode)
    return found | {"decode_roofline": share}


def loop(work: Workload) -> Row:
    """No cache, jitted: every token runs all tokens again, in an array one longer than before."""
    model = jax.block_until_ready(rooflax.load(work.model, dtype="float32"))
    prompt = work.prompts(model.config.vocab_size)[0]
    run = uncached(model, work.options)
    return _cold_and_warm(partial(run, prompt, work.output_tokens), work)[0]


def request(work: Workload) -> Row:
    """The first request of a new process, as a user makes it: its time holds compilation."""
    llm = rooflax.LLM(work.model, dtype=work.precision.dtype, options=work.options)
    prompts = work.prompts(llm.info.config.vocab_size)
    with count_compilations() as compiled:
        start = time.perf_counter()
        done = llm.generate(prompts, work.params())
        seconds = time.perf_counter() - start
    return {
        "cold": _cold(compiled, seconds),
        "tokens": [list(one.tokens) for one in done],
    }


JOBS: dict[str, Callable[[Workload], Row]] = {"cell": cell, "loop": loop, "request": request}


def run_job(name: str) -> None:
    """Runs a job given on stdin; whatever it prints goes to stderr."""
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        jax.block_until_ready(jax.jit(lambda: jnp.zeros(()))())  # the device is there
        found = JOBS[name](Workload.from_json(given))
    json.dump(found, sys.stdout)


def _cold_and_warm(
    job: Job, work: Workload, read: ReadCeiling = lambda: Ceiling(0.0, 0.0, "none", 0)
) -> tuple[Row, list[Trial]]:
    """The job's first run, warm-up until nothing compiles, and its trials."""
    with count_compilations() as compiled:
        start = time.perf_counter()
        job()
        cold_s = time.perf_counter() - start
    warm_up(job)
    trials, _ = run_trials(job, read, work.trials)
    lines = [trial.timeline for trial in trials]
    speeds = {
        "tok_per_s": [len(line.tokens[0]) / (line.ttft_s + line.decode_s) for line in lines],
        "ttft_s": [line.ttft_s for line in lines],
        "decode_tok_per_s": [line.decode_tok_per_s for line in lines],
    }
    found = {name: Summary.of(values).as_json() for name, values in speeds.items()}
    if any(line.tokens != lines[0].tokens for line in lines):
        raise RuntimeError("trials of one row gave different tokens")
    tokens = [list(row) for row in lines[0].tokens]
    return {**found, "cold": _cold(compiled, cold_s), "tokens": tokens}, trials


def _cold(compiled: Any, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "compilations": compiled.requests,
        "compile_s": compiled.seconds,
    }


def uncached(model: Model, options: ExecutionOptions) -> Callable[[list[int], int], Timeline]:
    """(prompt, number of new tokens) -> when they came. Every token is a new shape."""

    @jax.jit
    def next_token(model: Model, tokens: jax.Array) -> jax.Array:
        hidden, _ = model.forward(Batch.dense(tokens), options=options)
        return model.logits(hidden[:, -1], options=options).argmax(-1)

    def run(prompt: list[int], number: int) -> Timeline:
        start, ids, arrivals = time.perf_counter(), list(prompt), []
        for _ in range(number):
            token = next_token(model, np.array([ids], np.int32))
            ids.append(int(np.asarray(token)[0]))  # on the host: no program for indexing
            arrivals.append(time.perf_counter())
        return Timeline(start, [arrivals], [tuple(ids[len(prompt) :])])

    return run


# The tables.


def measure_gpt2(settings: Settings) -> list[Row]:
    """{no cache, cache} x {no jit, jit} in plain JAX, the default settings, and int8 weights."""
    work, jitted, eager = settings.gpt2.work, settings.trials, settings.eager_trials
    cache = counted(settings.gpt2)
    plan = (
        ("no cache, no jit", "1.50 tok/s, 1.00x", None, "cell", work(eager, **BASELINE)),
        ("no cache, jit", "", None, "loop", work(jitted, **PLAIN)),
        ("cache, no jit", "10x to 13x (estimate)", cache, "cell", work(eager, jit=False, **PLAIN)),
        ("cache, jit", "24.45 tok/s, 16.32x", cache, "cell", work(jitted, **PLAIN)),
        ("default settings", "", cache, "cell", work(jitted)),
        ("int8 weights", "24.45 tok/s, 16.32x", cache, "cell", work(jitted, quantize="int8")),
    )
    return [
        {**apart(job, row, label), "seed": seed, "counted": cache}
        for label, seed, cache, job, row in plan
    ]


def measure_cold(settings: Settings) -> list[dict[str, Any]]:
    """Old method against new, each in new processes, in turn: compilation is in the time."""
    found = []
    for shape, processes, trials, seed in (
        (settings.qwen, settings.processes, settings.trials, "51.1 s, 12.8 s, 3.98x"),
        (settings.qwen_full, 1, settings.eager_trials, "8x to 10x (forecast)"),
    ):
        old, new = [], []
        for _ in range(processes):
            old.append(apart("loop", shape.work(trials, **PLAIN), OLD))
            new.append(apart("request", shape.work(trials), NEW))
        warm = apart("cell", shape.work(trials), "default settings")
        about = {"model": shape.model, "output_tokens": shape.output_tokens, "seed": seed}
        found.append({**about, "old": old, "new": new, "warm": warm, "counted": counted(shape)})
    return found


STEPS = (
    ("baseline", {}, "1.0x"),
    ("+ GQA", {"gqa": "grouped"}, "1.05x"),
    ("+ MoE grouping", {"moe": "grouped"}, "1.15x"),
    ("+ KV cache", {"use_cache": True}, "50x"),
    ("+ jit", {"jit": True}, "1.1x"),
    ("default settings", {"kernels": None}, ""),
)


def measure_gpt_oss(settings: Settings) -> list[Row]:
    """One option after the other; last, jitted without a cache, a program for every length."""
    options, rows = dict(SLOWEST), []
    for label, change, seed in STEPS:
        options |= change
        # A trial of the slowest rows takes a good part of a minute: one must do.
        slow = options["moe"] == "per_token"
        trials = 1 if slow else settings.trials if options["jit"] else settings.eager_trials
        cache = counted(settings.gpt_oss, later=True) if "use_cache" in change else None
        row = apart("cell", settings.gpt_oss.work(trials, **options), label)
        rows.append({**row, "seed": seed, "counted": cache})
    jitted = settings.gpt_oss.work(settings.trials, **PLAIN)
    return [*rows, {**apart("loop", jitted, "no cache, jit"), "seed": "", "counted": None}]


def measure_curve(settings: Settings) -> list[dict[str, Any]]:
    """The KV cache over lengths of context: prompt and output together."""
    new, points = settings.context_output, []
    for context in settings.contexts:
        shape = Shape(settings.gpt_oss.model, context - new, new)
        on, off = (shape.work(settings.trials, use_cache=use) for use in (True, False))
        cache = counted(shape, bucket(context, SMALLEST_CONTEXT), later=True)
        rows = {
            name: apart("cell", work, f"context {context}, cache {name}")
            for name, work in (("off", off), ("on", on))
        }
        points.append({"context": context, "counted": cache, **rows})
    return points


MEASURES: dict[str, Callable[[Settings], Any]] = {
    "gpt2": measure_gpt2,
    "qwen2.5": measure_cold,
    "gpt-oss": measure_gpt_oss,
    "kv-cache": measure_curve,
}


# The page: a function of the figures alone.


def totals(tables: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Per table the default settings against the slowest method, and against a jitted one.

    The second compares like with like: both jitted and warm in float32; the slower has no cache.
    """
    gpt2 = by_label(tables["gpt2"])
    cold = tables["qwen2.5"][0]
    oss = by_label(tables["gpt-oss"])
    default, jitted = "default settings", "no cache, jit"
    return {
        "gpt2": (
            ratio(gpt2["int8 weights"], gpt2["no cache, no jit"]),
            ratio(gpt2[default], gpt2[jitted]),
        ),
        "qwen2.5": (
            seconds(cold["old"]) / seconds(cold["new"]),
            ratio(cold["warm"], cold["old"][0]),
        ),
        "gpt-oss": (
            ratio(oss[default], oss["baseline"], LATER),
            ratio(oss[default], oss[jitted], LATER),
        ),
    }


def failures(found: Mapping[str, Any]) -> list[str]:
    """Totals that were not reached, and tables whose float32 rows gave different tokens."""
    tables = found["tables"]
    same = {
        "gpt2": [row for row in tables["gpt2"] if row["label"] != "int8 weights"],
        "gpt-oss": tables["gpt-oss"],
        **{f"{t['model']}": [*t["old"], *t["new"], t["warm"]] for t in tables["qwen2.5"]},
        **{f"context {p['context']}": [p["on"], p["off"]] for p in tables["kv-cache"]},
    }
    return [
        f"{name}: {times(total)} is below the {times(WANTED[name])} that is wanted"
        for name, (total, _) in totals(tables).items()
        if total < WANTED[name]
    ] + [
        f"{name}: the rows gave different tokens"
        for name, rows in same.items()
        if any(row["tokens"] != rows[0]["tokens"] for row in rows)
    ]


ABOUT = {
    "gpt2": "all tokens, warm; int8 weights, as there, against float32 without cache and jit",
    "qwen2.5": "from request to last token, compilation included, against the old method",
    "gpt-oss": "later tokens, warm, against no cache, no jit, K and V copied, MoE per token",
}


def markdown(found: Mapping[str, Any]) -> str:
    """The page."""
    e, tables = found["environment"], found["tables"]
    parts = [
        "# The tables of the seed documents, measured here",
        ("Written by `python -m benchmarks.founding` from the figures of "
        f"{e['date'][:10]} in founding-tables.json; do not edit. Measured on {e['cpu']}, "
        f"{e['threads']} threads, {e['system']}, with rooflax {e['rooflax']}, jax {e['jax']} and "
        f"Python {e['python']}, in {found['seconds'] / 60:.0f} minutes."),
        ("The seed documents are the reports with which this project began. They name no machine, "
        "so ratios are compared and not speeds. All models have random weights. A speed is a "
        "median, with its standard deviation and the number of trials. Counted are operations / "
        "bytes read without a cache over those with one: what the cache can bring at most where "
        "one of them takes all the time. Beyond that, time is saved on dispatch, copies and "
        "compilation."),
        section(
            "## Totals",
            "The default settings against the slowest method. Against jit: the slower side is "
            "jitted and warm as well, in float32 and without a cache. "
            + (" ".join(failures(found)) or "All float32 rows of a table gave the same tokens."),
            ("table", "seed documents", "here", "against jit", "what is compared"),
            [
                (name, times(WANTED[name]), times(total), times(jitted), ABOUT[name])
                for name, (total, jitted) in totals(tables).items()
            ],
        ),
        _gpt2_page(tables["gpt2"]),
        _qwen_page(tables["qwen2.5"]),
        _gpt_oss_page(tables["gpt-oss"]),
        _curve_page(tables["kv-cache"]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _gpt2_page(rows: list[Row]) -> str:
    return section(
        "## GPT-2: cache and jit",
        "4 prompt tokens, 15 new ones, greedy, float32 but for the last row, plain JAX but for the "
        "last two. Compiling is of the first run.",
        ("setting", "tok/s, all tokens", "ratio", "counted", "compiling", "seed documents"),
        [
            (
                row["label"], spread(row), times(ratio(row, rows[0])), counts(row["counted"]),
                compiling(row), row["seed"],
            )
            for row in rows
        ],
    )  # fmt: skip


def _qwen_page(found: list[dict[str, Any]]) -> str:
    return section(
        "## Qwen 2.5: the old method against the new one",
        "5 prompt tokens, greedy, float32. Old: jitted, no cache, a new shape for every token. "
        "New: the default settings. Cold is a new process from the request to the last "
        "token, compilation included and loading excluded; in brackets the number of processes.",
        (
            "model, new tokens", "old, cold", "new, cold", "ratio", "old, warm tok/s",
            "new, warm tok/s", "ratio", "counted", "seed documents",
        ),
        [
            (
                f"`{one['model']}`, {one['output_tokens']}", cold(one["old"]), cold(one["new"]),
                times(seconds(one["old"]) / seconds(one["new"])),
                spread(one["old"][0]), spread(one["warm"]),
                times(ratio(one["warm"], one["old"][0])), counts(one["counted"]), one["seed"],
            )
            for one in found
        ],
    )  # fmt: skip


def _gpt_oss_page(rows: list[Row]) -> str:
    def step(row: Row, before: Row) -> str:
        return "" if row is rows[-1] else times(ratio(row, before, LATER))

    return section(
        "## GPT-OSS, small: one option after the other",
        "32 prompt tokens, 8 new ones, greedy, float32, warm, plain JAX but for the default "
        "settings. The last row is no step: a program for every length. The seed documents give "
        "about 60x in all.",
        (
            "setting", "later tok/s", "step", "counted", "in all", "TTFT", "compiling",
            "seed documents, step",
        ),
        [
            (
                row["label"], spread(row, LATER), step(row, before), counts(row["counted"]),
                times(ratio(row, rows[0], LATER)), duration(row["ttft_s"]["median"]),
                compiling(row), row["seed"],
            )
            for before, row in zip([rows[0], *rows], rows, strict=False)
        ],
    )  # fmt: skip


def _curve_page(points: list[dict[str, Any]]) -> str:
    return section(
        "## The KV cache over lengths of context",
        "The same model. The context is the prompt and the new tokens. Without a cache every step "
        f"runs the whole context, padded to {SMALLEST_CONTEXT} tokens or a power of two above. The "
        "seed documents give 50x to 100x for later tokens and no length of context.",
        (
            "context", "TTFT off", "TTFT on", "later tok/s off", "later tok/s on", "ratio",
            "counted",
        ),
        [
            (
                str(p["context"]),
                *(duration(p[side]["ttft_s"]["median"]) for side in ("off", "on")),
                *(spread(p[side], LATER) for side in ("off", "on")),
                times(ratio(p["on"], p["off"], LATER)), counts(p["counted"]),
            )
            for p in points
        ],
    )  # fmt: skip


def section(title: str, intro: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title, a paragraph and a Markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    return "\n\n".join([title, intro, "\n".join(lines)])


def by_label(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["label"]: row for row in rows}


def ratio(row: Row, base: Row, name: str = "tok_per_s") -> float:
    return row[name]["median"] / base[name]["median"]


def cold(runs: list[Row]) -> str:
    return f"{duration(seconds(runs))} ({len(runs)})"


def seconds(runs: list[Row]) -> float:
    return median(run["cold"]["seconds"] for run in runs)


def number(value: float) -> str:
    """Three significant digits or so: 0.39, 24.5, 713."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def times(value: float) -> str:
    return f"{number(value)}x"


def counts(found: Sequence[float] | None) -> str:
    return "" if found is None else " / ".join(times(value) for value in found)


def duration(value: float) -> str:
    return f"{number(value)} s" if value >= 0.5 else f"{number(value * 1e3)} ms"


def compiling(row: Row) -> str:
    return f"{row['cold']['compilations']} in {duration(row['cold']['compile_s'])}"


def spread(row: Row, name: str = "tok_per_s") -> str:
    """Median, standard deviation where there are trials to have one, and their number."""
    found = row[name]
    trials = len(found["trials"])
    deviation = f" ± {number(found['std'])}" if trials > 1 else ""
    return f"{number(found['median'])}{deviation} ({trials})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "docs")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run_job(args.job)
        return 0
    figures, page = (args.out / f"founding-tables.{kind}" for kind in ("json", "md"))
    if args.render:
        found = json.loads(figures.read_text(encoding="utf-8"))
    else:
        settings, start = SMOKE if args.smoke else Settings(), time.perf_counter()
        where = environment()
        tables = {name: measure(settings) for name, measure in MEASURES.items()}
        took = time.perf_counter() - start
        found = {"environment": where, "seconds": took, "tables": tables}
        figures.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(found), encoding="utf-8")
    missed = [] if args.smoke else failures(found)
    for line in missed:
        sys.stderr.write(f"FAILED: {line}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
