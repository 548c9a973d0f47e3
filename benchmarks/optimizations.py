"""What each option brings here: the tables of docs/optimizations.md.

    python benchmarks/optimizations.py              measures, and writes figures and tables
    python benchmarks/optimizations.py --models M   of other models (M,M,...)
    python benchmarks/optimizations.py --render     writes the tables again from the saved figures

Ablations and comparisons are runs of `rooflax bench`. What has no flag (donation, exact shapes) is
measured here, in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import Model, decode_step, load, new_cache, prefill
from rooflax.bench.environment import environment
from rooflax.bench.figures import paired_ratio
from rooflax.bench.measure import Bench
from rooflax.bench.report import ablation_markdown
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.folders import CACHE_VARIABLE
from rooflax.loading.model_info import model_info
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
PAGE = ROOT / "docs" / "optimizations.md"
FIGURES = ROOT / "docs" / "optimizations.json"

MODELS = ("preset:gpt2-tiny", "preset:qwen2.5-tiny", "preset:gpt-oss-tiny")
ABLATION = ("--ablate", "--prompt-tokens", "8", "--output-tokens", "12", "--trials", "2")
"""Short, because its first row takes seconds per token on some models."""
START = ("--layers", "unrolled,scan", "--output-tokens", "16", "--trials", "1")
TRIALS = 10
DONATION_CACHE, DONATION_PROMPT, DONATION_STEPS = 1024, 16, 16
BUCKET_PROMPT, BUCKET_OUTPUT, BUCKET_TRIALS = 8, 8, 5

Figures = dict[str, Any]


@dataclass(frozen=True)
class Against:
    """A setting measured interleaved with the default one.

    Attributes:
        option: the block of the page that shows it.
        flags: of --versus.
        prompt_tokens, output_tokens: long where an option is about contexts.
        applies: whether it does anything for a config.
    """

    option: str
    flags: str
    prompt_tokens: int = 64
    output_tokens: int = 64
    applies: Callable[[Any], bool] = lambda config: True


def has_shared_heads(config: Any) -> bool:
    return config.num_kv_heads < config.num_heads


def has_experts(config: Any) -> bool:
    return config.moe is not None


AGAINST = (
    Against("kv-cache", "--no-cache"),
    Against("decode-steps", "--decode-steps 1"),
    Against("decode-steps", "--decode-steps 32"),
    Against("gqa", "--gqa repeat", 896, 64, has_shared_heads),
    Against("moe", "--moe per_token", 256, 32, has_experts),
    Against("moe", "--moe dense", 256, 32, has_experts),
    Against("kernels", "--kernels xla"),
    Against("quantize", "--quantize int8"),
    Against("quantize", "--quantize int4"),
    Against("layers", "--layers unrolled"),
    Against("kv-dtype", "--kv-dtype bfloat16", 896),
    Against("dtype", "--dtype bfloat16"),
)


def bench(model: str, *flags: str, **variables: str) -> Figures:
    """A document of `rooflax bench --json`, with these environment variables set."""
    return run(["-m", "rooflax", "bench", "--json", "--quiet", model, *flags], **variables)


def run(arguments: Sequence[str], **variables: str) -> Figures:
    """What a Python process prints, as JSON."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def measure_model(model: str, trials: int) -> Figures:
    """Everything about one model."""
    config = model_info(model).config
    parts: dict[str, Callable[[], Any]] = {
        "ablation": lambda: bench(model, *ABLATION)["ablation"],
        "against": lambda: [
            measure_against(model, a, trials) for a in AGAINST if a.applies(config)
        ],
        "start": lambda: measure_start(model),
        "donation": lambda: run([__file__, "--one", "donation", model]),
        "buckets": lambda: run(
            [__file__, "--one", "buckets", model], JAX_ENABLE_COMPILATION_CACHE="false"
        ),
    }
    found = {}
    for name, measure in parts.items():
        start = time.perf_counter()
        found[name] = measure()
        sys.stderr.write(f"{time.perf_counter() - start:6.1f} s  {model} {name}\n")
    return found


def measure_against(model: str, against: Against, trials: int) -> Figures:
    lengths = ("--prompt-tokens", against.prompt_tokens, "--output-tokens", against.output_tokens)
    flags = (f"--versus={against.flags}", *map(str, lengths), "--trials", str(trials))
    return {
        "option": against.option,
        "flags": against.flags,
        "prompt_tokens": against.prompt_tokens,
        "output_tokens": against.output_tokens,
        **bench(model, *flags),
    }


def measure_start(model: str) -> Figures:
    """Compile times of both kinds of layers: with an empty compile cache, then with that one."""
    with tempfile.TemporaryDirectory() as folder:
        cold, kept = (bench(model, *START, **{CACHE_VARIABLE: folder}) for _ in range(2))
    return {
        name: {
            row["options"]["layers"]: {
                "compile_s": row["compile_s"],
                "compilations": row["compilations"],
            }
            for row in document["results"]
        }
        for name, document in (("cold", cold), ("kept", kept))
    }


def measure_donation(model_name: str) -> Figures:
    """Decode steps that may write the cache in place, against steps that must copy it."""
    model = load(model_name)
    prompt = jnp.arange(DONATION_PROMPT, dtype=jnp.int32)[None]
    steps = [jax.jit(decode_step, donate_argnums=donated) for donated in ((), (1,))]
    first = jax.jit(prefill)

    def tok_per_s(step: Callable) -> float:
        cache = new_cache(model, max_tokens=DONATION_CACHE)
        _, cache = jax.block_until_ready(first(model, cache, prompt))
        start = time.perf_counter()
        for index in range(DONATION_STEPS):
            position = np.array([DONATION_PROMPT + index], np.int32)
            logits, cache = step(model, cache, position, position)
            logits.block_until_ready()
        return DONATION_STEPS / (time.perf_counter() - start)

    for step in steps * 2:
        tok_per_s(step)
    pairs = [[tok_per_s(step) for step in steps] for _ in range(TRIALS)]
    cache = new_cache(model, max_tokens=DONATION_CACHE)
    where = jnp.zeros(1, jnp.int32)
    analysis = steps[1].lower(model, cache, where, where).compile().memory_analysis()
    return {
        **paired_ratio(*zip(*pairs, strict=True)).as_json(),
        "cache_bytes": cache.num_bytes,
        "in_place_bytes": 0 if analysis is None else analysis.alias_size_in_bytes,
    }


def measure_buckets(model_name: str) -> Figures:
    """A program per length, against padded shapes without and with a cache."""
    work = Workload(model_name, prompt_tokens=BUCKET_PROMPT, output_tokens=BUCKET_OUTPUT)
    padded = Workload(
        model_name,
        prompt_tokens=BUCKET_PROMPT,
        output_tokens=BUCKET_OUTPUT,
        options=ExecutionOptions(use_cache=False),
    )
    bench = Bench(work)
    exact = exact_loop(bench.llm.model)
    jobs = {
        "exact": lambda: exact(bench.prompts[0], BUCKET_OUTPUT),
        "padded": Bench(padded).run,
        "cached": bench.run,
    }
    found: Figures = {"prompt_tokens": BUCKET_PROMPT, "output_tokens": BUCKET_OUTPUT}
    for name, job in jobs.items():
        with count_compilations() as compiled:
            first = seconds_of(job)
        found[name] = {
            "compilations": compiled.compilations,
            "first_s": first,
            "warm_s": median(seconds_of(job) for _ in range(BUCKET_TRIALS)),
        }
    return found


def exact_loop(model: Model) -> Callable[[list[int], int], None]:
    """Jitted, without a cache; every token is a new shape."""

    @jax.jit
    def next_token(model: Model, tokens: jax.Array) -> jax.Array:
        hidden, _ = model.forward(Batch.dense(tokens))
        return model.logits(hidden[:, -1]).argmax(-1)

    def generate(prompt: list[int], count: int) -> None:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(np.asarray(next_token(model, np.array([ids], np.int32)))[0]))

    return generate


def seconds_of(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


PARTS = {"donation": measure_donation, "buckets": measure_buckets}


def blocks(document: Figures) -> dict[str, str]:
    """The generated parts of the page by name; a function of the document alone."""
    models = document["models"]
    return {
        "environment": about(document),
        "ablation": "\n\n".join(
            f"`{name}`:\n\n{ablation_markdown(found['ablation'])}" for name, found in models.items()
        ),
        **{option: against_table(models, option) for option in {a.option for a in AGAINST}},
        "jit": all_but_table(models, "jit"),
        "donation": donation_table(models),
        "compile-cache": start_table(models, cache=True),
        "compile-layers": start_table(models, cache=False),
        "buckets": buckets_table(models),
    }


def table(*rows: Sequence[str]) -> str:
    """A Markdown table, header first."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def about(document: Figures) -> str:
    e = document["environment"]
    return textwrap.fill(
        f"{e['cpu']}, {e['threads']} threads, {e['device']}, load average {e['load_average']} at "
        f"the start; rooflax {e['rooflax']}, jax {e['jax']}, Python {e['python']}; {e['date']}, "
        f"{document['seconds'] / 60:.0f} minutes; {document['trials']} pairs per comparison.",
        100,
    )


def against_table(models: Figures, option: str) -> str:
    """Interleaved comparisons of one option's other settings with the default."""
    rows = [
        (
            name,
            f"`{row['flags']}`",
            f"{row['prompt_tokens']} + {row['output_tokens']}",
            ratio(row["decode"]),
            ratio(row["prefill"]),
            "same" if row["same_tokens"] else "different",
        )
        for name, found in models.items()
        for row in found["against"]
        if row["option"] == option
    ]
    head = ("model", "setting", "prompt + new", "decode, x default", "prefill, x default", "tokens")
    return table(head, *rows) if rows else "No model that was measured has it."


def ratio(found: Figures) -> str:
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}] {found['verdict']}"


def all_but_table(models: Figures, option: str) -> str:
    """Everything on, against everything but one option, from the ablations."""
    rows = []
    for name, found in models.items():
        by_label = {row["label"]: row for row in found["ablation"]}
        without = by_label[f"all but {option}"]
        full = [row for row in found["ablation"] if row["label"].startswith("+")][-1]
        for test in ("decode", "prefill"):
            slow, fast = (row[f"{test}_tok_per_s"] for row in (without, full))
            rows.append((name, test, number(slow), number(fast), f"{number(fast / slow)}x"))
    head = ("model", "test", f"all but {option}, tok/s", "all, tok/s", "ratio")
    return table(head, *rows)


def donation_table(models: Figures) -> str:
    rows = [
        (
            name,
            mib(found["donation"]["cache_bytes"]),
            mib(found["donation"]["in_place_bytes"]),
            ratio(found["donation"]),
        )
        for name, found in models.items()
    ]
    head = ("model", "KV cache", "updated in place", "decode steps, x not donated")
    return table(head, *rows)


def start_table(models: Figures, *, cache: bool) -> str:
    """Compile seconds: empty cache against a kept one, or unrolled against scanned layers."""
    rows = []
    for name, found in models.items():
        start = found["start"]
        sides = (
            (start["cold"]["unrolled"], start["kept"]["unrolled"])
            if cache
            else (start["cold"]["unrolled"], start["cold"]["scan"])
        )
        rows.append(
            (name, *(f"{s['compile_s']:.2f} s ({s['compilations']} programs)" for s in sides))
        )
    head = ("empty cache", "kept") if cache else ("unrolled", "scan")
    return table(("model", *(f"compile, {text}" for text in head)), *rows)


def buckets_table(models: Figures) -> str:
    shown = {
        "exact": "no cache, a program per length",
        "padded": "no cache, padded",
        "cached": "cache, padded (the default)",
    }
    rows = [
        (
            name,
            text,
            "{prompt_tokens} + {output_tokens}".format(**found["buckets"]),
            str(found["buckets"][kind]["compilations"]),
            seconds(found["buckets"][kind]["first_s"]),
            seconds(found["buckets"][kind]["warm_s"]),
        )
        for name, found in models.items()
        for kind, text in shown.items()
    ]
    head = ("model", "shapes", "prompt + new", "programs", "first request", "warm request")
    return table(head, *rows)


def number(value: float) -> str:
    """Three significant digits or so."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float) -> str:
    return f"{number(value)} s" if value >= 0.5 else f"{number(value * 1e3)} ms"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def page_with_figures(page: str, document: Figures) -> str:
    """The page with what is between each pair of markers replaced."""
    from benchmarks.pages import with_blocks

    return with_blocks(page, blocks(document))


def main() -> None:
    parser = argparse.ArgumentParser(description="What each option brings here.")
    parser.add_argument("--models", metavar="M,M", default=",".join(MODELS))
    parser.add_argument("--trials", metavar="N", type=int, default=TRIALS, help="pairs; default 10")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, model = args.one
        sys.stdout.write(json.dumps(PARTS[part](model)) + "\n")
        return
    if args.render:
        document = json.loads(FIGURES.read_text(encoding="utf-8"))
    else:
        start, found = time.perf_counter(), environment()
        models = {name: measure_model(name, args.trials) for name in args.models.split(",")}
        document = {
            "environment": found,
            "seconds": time.perf_counter() - start,
            "trials": args.trials,
            "models": models,
        }
        FIGURES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_figures(page, document), encoding="utf-8")


if __name__ == "__main__":
    main()
