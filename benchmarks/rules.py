"""What each mistake of measuring costs here: the wrong figure beside the right one.

    python benchmarks/rules.py                measures, and writes figures and table
    python benchmarks/rules.py --only NAME    measures one rule again, and keeps the others
    python benchmarks/rules.py --render       writes the table again from the saved figures

Every rule is measured in a process of its own without a compile cache, so that none is warmed up by
another. The wrong way is written out here; the right way is what `rooflax bench` does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import Model, new_cache, prefill
from rooflax.bench.ceilings import LARGEST_BUFFER, ceiling_reader
from rooflax.bench.environment import environment
from rooflax.bench.figures import paired_ratio, unpaired_ratio
from rooflax.bench.measure import Bench, measure, median_share, share_of_roofline
from rooflax.bench.timing import best_of
from rooflax.bench.trials import run_trial, warm_up
from rooflax.bench.worker import measure_apart
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
PAGE = ROOT / "docs" / "benchmarking.md"
FIGURES = ROOT / "docs" / "benchmarking-figures.json"

TRIALS = 5
WORK = Workload(None, prompt_tokens=16, output_tokens=64)
"""The embedded model; what most rules run."""
SHORT, LONG, LOOP_PROMPT = 5, 15, 4
AWAITED_PROMPT = 256
COMPARISONS = 20
CLAIMED = 0.05
"""A difference above this is what somebody would report who looks at two means."""
CEILING_TRIALS = 60
SMALL_MATRIX, PRODUCTS = 1448, 200
"""Its float32 weights are 8 MiB."""

Figures = dict[str, Any]


def cold_start() -> Figures:
    """The first request of a process, against those after it."""
    bench = Bench(WORK)
    with count_compilations() as compiled:
        first = request(bench)
    return {
        "wrong_tok_per_s": first,
        "right_tok_per_s": median(request(bench) for _ in range(TRIALS)),
        "compilations": compiled.compilations,
        "compile_s": compiled.seconds,
    }


def request(bench: Bench) -> float:
    """Tokens per second as somebody with a watch sees them, compilation included."""
    start = time.perf_counter()
    bench.run()
    return bench.work.batch * bench.work.output_tokens / (time.perf_counter() - start)


def short_warm_up() -> Figures:
    """A jitted loop without a cache, whose every token has a new shape."""
    bench = Bench(Workload("preset:gpt2-tiny", prompt_tokens=LOOP_PROMPT, output_tokens=LONG))
    generate = exact_loop(bench.llm.model)
    generate(bench.prompts[0], SHORT)
    with count_compilations() as compiled:
        wrong = generate(bench.prompts[0], LONG)
    right = median(generate(bench.prompts[0], LONG) for _ in range(TRIALS))
    return {
        "wrong_tok_per_s": wrong,
        "right_tok_per_s": right,
        "compilations": compiled.compilations,
        "fixed_shapes_compilations": compilations_after_a_short_warm_up(),
    }


def exact_loop(model: Model) -> Callable[[list[int], int], float]:
    """(prompt, new tokens) to tokens per second; every token runs all tokens before it."""

    @jax.jit
    def next_token(model: Model, tokens: jax.Array) -> jax.Array:
        hidden, _ = model.forward(Batch.dense(tokens))
        return model.logits(hidden[:, -1]).argmax(-1)

    def generate(prompt: list[int], count: int) -> float:
        ids, start = list(prompt), time.perf_counter()
        for _ in range(count):
            ids.append(int(np.asarray(next_token(model, np.array([ids], np.int32)))[0]))
        return count / (time.perf_counter() - start)

    return generate


def compilations_after_a_short_warm_up() -> int:
    """The same mistake with shapes that do not grow."""
    short, long = (
        Bench(Workload("preset:gpt2-tiny", prompt_tokens=LOOP_PROMPT, output_tokens=count))
        for count in (SHORT, LONG)
    )
    short.run()
    with count_compilations() as compiled:
        long.run()
    return compiled.compilations


def other_settings() -> Figures:
    """Warmed up without a cache, tested with one."""
    work = Workload("preset:qwen2.5-tiny", prompt_tokens=4, output_tokens=32)
    options = ExecutionOptions(use_cache=False)
    uncached = Bench(Workload(work.model, prompt_tokens=4, output_tokens=32, options=options))
    warm_up(uncached.run)
    cached = Bench(work)
    wrong = request(cached)
    right = median(request(cached) for _ in range(TRIALS))
    base = median(request(uncached) for _ in range(TRIALS))
    return {"wrong_ratio": wrong / base, "right_ratio": right / base}


def load_inside() -> Figures:
    """A warm process that loads the model again inside the clock."""
    bench = Bench(WORK)
    warm_up(bench.run)
    right = median(request(bench) for _ in range(TRIALS))
    with count_compilations() as compiled:
        start = time.perf_counter()
        Bench(WORK).run()
        wrong = WORK.output_tokens / (time.perf_counter() - start)
    return {
        "wrong_tok_per_s": wrong,
        "right_tok_per_s": right,
        "compilations": compiled.compilations,
    }


def not_awaited() -> Figures:
    """A prefill of which only the dispatch is timed."""
    work = Workload(None, prompt_tokens=AWAITED_PROMPT, output_tokens=2)
    bench = Bench(work)
    model, tokens = bench.llm.model, jnp.array(bench.prompts)
    call = jax.jit(prefill)
    cache = new_cache(model, max_tokens=AWAITED_PROMPT)
    jax.block_until_ready(call(model, cache, tokens))
    read = ceiling_reader(bench.prefill.total_bytes, bench.multiplied)
    before = read()
    wrong, right = [], []
    for _ in range(TRIALS):
        start = time.perf_counter()
        result = call(model, cache, tokens)
        wrong.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        right.append(time.perf_counter() - start)
    after = read()
    return {
        f"{name}_{what}": value
        for name, seconds in (("wrong", median(wrong)), ("right", median(right)))
        for what, value in (
            ("tok_per_s", AWAITED_PROMPT / seconds),
            ("share", share_of_roofline(bench.prefill, before, after, seconds)),
        )
    }


def runs() -> Figures:
    """Many runs of one job: what one trial says, and what the order of a comparison does."""
    bench = Bench(WORK)
    warm_up(bench.run)
    start = time.perf_counter()
    speeds = [bench.run().decode_tok_per_s for _ in range(2 * TRIALS * COMPARISONS)]
    return {"seconds": time.perf_counter() - start, "decode_tok_per_s": speeds}


def one_trial(speeds: Sequence[float]) -> Figures:
    """How far one trial, and the mean of five, lie from the mean of all."""
    mean = fmean(speeds)
    singles, means = [[s / mean - 1 for s in sample] for sample in (speeds, means_of(speeds))]
    pairs = list(zip(speeds[::2], speeds[1::2], strict=True))
    return {
        "single_low": min(singles),
        "single_high": max(singles),
        "mean_low": min(means),
        "mean_high": max(means),
        "pairs": len(pairs),
        "pairs_claimed": sum(abs(b / a - 1) > CLAIMED for a, b in pairs),
    }


def means_of(speeds: Sequence[float]) -> list[float]:
    """The mean of every TRIALS runs in a row."""
    return [fmean(block) for block in blocks_of(speeds)]


def blocks_of(speeds: Sequence[float]) -> list[Sequence[float]]:
    """TRIALS runs in a row each."""
    return [speeds[first : first + TRIALS] for first in range(0, len(speeds), TRIALS)]


def order(speeds: Sequence[float]) -> Figures:
    """The job compared with itself, in three orders of the same runs.

    Returns:
        Per order, how many of COMPARISONS means differ by more than CLAIMED, and how many get a
        verdict from the 99% interval.
    """
    blocks = blocks_of(speeds)
    adjacent = list(zip(blocks[::2], blocks[1::2], strict=True))
    apart = list(zip(blocks[:COMPARISONS], blocks[COMPARISONS:], strict=True))
    taken = [alternating([*a, *b]) for a, b in adjacent]
    orders = (
        ("adjacent", adjacent, unpaired_ratio),
        ("apart", apart, unpaired_ratio),
        ("interleaved", taken, paired_ratio),
    )
    return {
        name: {
            "claimed": sum(abs(fmean(b) / fmean(a) - 1) > CLAIMED for a, b in sides),
            "verdicts": sum(compare(a, b).verdict != "no difference shown" for a, b in sides),
        }
        for name, sides, compare in orders
    }


def alternating(speeds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Runs as pairs of alternating order: a b, b a, a b ..."""
    a, b = [], []
    for index, pair in enumerate(zip(speeds[::2], speeds[1::2], strict=True)):
        first, second = pair if index % 2 == 0 else reversed(pair)
        a.append(first)
        b.append(second)
    return a, b


def old_ceiling() -> Figures:
    """Shares of decode steps by each single reading, and by the readings around each trial."""
    bench = Bench(WORK)
    warm_up(bench.run)
    read = ceiling_reader(bench.decode.total_bytes, bench.multiplied)
    start = time.perf_counter()
    trials = [run_trial(bench.run, read) for _ in range(CEILING_TRIALS)]
    seconds = time.perf_counter() - start
    readings = [c for t in trials for c in (t.before, t.after)]
    times_s = [t.timeline.tpot_s for t in trials]
    wrong = [median(share_of_roofline(bench.decode, c, c, s) for s in times_s) for c in readings]
    return {
        "seconds": seconds,
        "lowest_gb_per_s": min(c.read_gb_per_s for c in readings),
        "highest_gb_per_s": max(c.read_gb_per_s for c in readings),
        "lowest_share": min(wrong),
        "highest_share": max(wrong),
        "right_share": median_share(trials, times_s, bench.decode),
        "trials": CEILING_TRIALS,
    }


def small_working_set() -> Figures:
    """Matmuls of one row with weights that stay in the last-level cache."""
    weights = jnp.full((SMALL_MATRIX, SMALL_MATRIX), 1 / SMALL_MATRIX, jnp.float32)

    @jax.jit
    def multiply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: jnp.tanh(y @ weights), x)

    x = jnp.ones((1, SMALL_MATRIX), jnp.float32)
    jax.block_until_ready(multiply(x, weights))
    memory, own = (ceiling_reader(size, "float32") for size in (LARGEST_BUFFER, weights.nbytes))
    found: dict[str, list[float]] = {"read": [], "memory": [], "own": []}
    for _ in range(TRIALS):
        found["memory"].append(memory().read_gb_per_s)
        found["own"].append(own().read_gb_per_s)
        found["read"].append(PRODUCTS * weights.nbytes / best_of(multiply, x, weights) / 1e9)
    read, memory_rate, own_rate = (median(found[n]) for n in ("read", "memory", "own"))
    return {
        "bytes": weights.nbytes,
        "read_gb_per_s": read,
        "memory_gb_per_s": memory_rate,
        "own_gb_per_s": own_rate,
        "wrong_share": read / memory_rate,
        "right_share": read / own_rate,
    }


def one_process() -> Figures:
    """Peak memory of a small row after a large one, and alone."""
    large = Workload(None, batch=8, prompt_tokens=256, output_tokens=8, trials=1)
    small = Workload(None, prompt_tokens=16, output_tokens=8, trials=1)
    measure(large)
    wrong = measure(small)["peak_rss_bytes"]
    right = measure_apart(small)["result"]["peak_rss_bytes"]
    return {"wrong_bytes": wrong, "right_bytes": right}


@dataclass(frozen=True)
class Rule:
    """A line of the table.

    Attributes:
        title: the mistake.
        measure: its figures, or those that `derive` takes.
        cells: figures to (wrong way, its figure, right way, its figure).
        notes: figures to further sentences.
    """

    title: str
    measure: Callable[[], Figures]
    cells: Callable[[Figures], tuple[str, str, str, str]]
    notes: Callable[[Figures], list[str]] = lambda f: []


def speeds_of(wrong: str, right: str) -> Callable[[Figures], tuple[str, str, str, str]]:
    """Cells of a rule whose figures are two speeds."""
    return lambda f: (wrong, speed(f["wrong_tok_per_s"]), right, speed(f["right_tok_per_s"]))


def cells_of_awaiting(f: Figures) -> tuple[str, str, str, str]:
    wrong, right = (
        f"{speed(f[f'{n}_tok_per_s'])}, {f[f'{n}_share']:.0%} of the roofline"
        for n in ("wrong", "right")
    )
    return "stop the clock when the call returns", wrong, "when its result is there", right


def cells_of_runs(f: Figures) -> tuple[str, str, str, str]:
    found = one_trial(f["decode_tok_per_s"])
    single = f"{found['single_low']:+.0%} to {found['single_high']:+.0%} of the mean of all"
    mean = f"{found['mean_low']:+.0%} to {found['mean_high']:+.0%}"
    return "one trial", single, f"mean of {TRIALS}", mean


def notes_of_runs(f: Figures) -> list[str]:
    single, orders = one_trial(f["decode_tok_per_s"]), order(f["decode_tok_per_s"])
    count, gap = COMPARISONS, f["seconds"] / 2
    return [
        (
            f"One trial: two runs of the same job in a row differ by more than {CLAIMED:.0%} in "
            f"{single['pairs_claimed']} of {single['pairs']} pairs."
        ),
        (
            f"One after the other: the job against itself, {count} times {TRIALS} runs against "
            f"{TRIALS}. The means differ by more than {CLAIMED:.0%} in "
            f"{orders['apart']['claimed']} where {gap:.0f} s lie between the sides, in "
            f"{orders['adjacent']['claimed']} where one follows the other, and in "
            f"{orders['interleaved']['claimed']} where the same runs are interleaved. bench's "
            f"99% interval gives a wrong verdict in {orders['apart']['verdicts']}, "
            f"{orders['adjacent']['verdicts']} and {orders['interleaved']['verdicts']} of them."
        ),
    ]


def cells_of_order(f: Figures) -> tuple[str, str, str, str]:
    found = order(f["decode_tok_per_s"])
    return (
        "all of A, then all of B; two means",
        f"{found['apart']['claimed']} of {COMPARISONS} times it differs from itself",
        "interleaved; a 99% interval",
        f"{found['interleaved']['verdicts']} of {COMPARISONS}",
    )


RULES = {
    "cold_start": Rule(
        "compilation inside the clock",
        cold_start,
        speeds_of("time the first request", f"warm up, then the median of {TRIALS}"),
        lambda f: [
            (f"Compilation inside the clock: {f['compilations']} programs, {f['compile_s']:.1f} s.")
        ],
    ),
    "short_warm_up": Rule(
        "a warm-up shorter than the test",
        short_warm_up,
        speeds_of(f"warm up {SHORT} tokens, time {LONG}", f"warm up {LONG}, time {LONG}"),
        lambda f: [
            (
                f"A warm-up shorter than the test: {f['compilations']} programs are compiled in "
                f"the test where every length is a shape of its own, "
                f"{f['fixed_shapes_compilations']} with rooflax's fixed shapes."
            )
        ],
    ),
    "other_settings": Rule(
        "settings changed between warm-up and test",
        other_settings,
        lambda f: (
            "warm up without a KV cache, time with one",
            f"cache brings {times(f['wrong_ratio'])}",
            "warm up each setting",
            f"cache brings {times(f['right_ratio'])}",
        ),
    ),
    "load_inside": Rule(
        "loading inside the clock",
        load_inside,
        speeds_of("open the model, generate", "open it before"),
    ),
    "not_awaited": Rule("a result that is not awaited", not_awaited, cells_of_awaiting),
    "one_trial": Rule("one trial instead of several", runs, cells_of_runs, notes_of_runs),
    "order": Rule("A, then B, instead of interleaved", runs, cells_of_order),
    "old_ceiling": Rule(
        "a ceiling that was read once",
        old_ceiling,
        lambda f: (
            "one reading for all trials",
            f"{f['lowest_share']:.0%} to {f['highest_share']:.0%} of the roofline, by its moment",
            "one before and one after each trial",
            f"{f['right_share']:.0%}",
        ),
        lambda f: [
            (
                f"A ceiling that was read once: within {f['seconds']:.0f} s the readings lie "
                f"between {f['lowest_gb_per_s']:.0f} and {f['highest_gb_per_s']:.0f} GB/s."
            )
        ],
    ),
    "small_working_set": Rule(
        "the ceiling of another size",
        small_working_set,
        lambda f: (
            f"{f['bytes'] / (1 << 20):.0f} MiB of weights against main memory",
            f"{f['wrong_share']:.0%} of {f['memory_gb_per_s']:.0f} GB/s",
            "against a buffer of their own size",
            f"{f['right_share']:.0%} of {f['own_gb_per_s']:.0f} GB/s",
        ),
    ),
    "one_process": Rule(
        "rows that share a process",
        one_process,
        lambda f: (
            "peak memory of a small row after a large one",
            f"{f['wrong_bytes'] / 1e6:.0f} MB",
            "in a process of its own",
            f"{f['right_bytes'] / 1e6:.0f} MB",
        ),
    ),
}
SAME_RUNS = {"order": "one_trial"}
"""Rules that look at another rule's runs."""


def number(value: float) -> str:
    """Three significant digits or so, whole thousands apart."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed(value: float) -> str:
    return f"{number(value)} tok/s"


def times(value: float) -> str:
    return f"{number(value)}x"


def rendered(document: dict[str, Any]) -> str:
    """The table and its notes; a function of the document alone."""
    rows = [("what is wrong", "the wrong way", "gives", "the right way", "gives"), ("---",) * 5]
    notes = []
    for name, rule in RULES.items():
        figures = document["rules"][SAME_RUNS.get(name, name)]
        rows.append((rule.title, *rule.cells(figures)))
        notes += rule.notes(figures)
    e = document["environment"]
    notes.append(
        f"{e['cpu']}, {e['threads']} threads, {e['device']}, load average {e['load_average']} at "
        f"the start; rooflax {e['rooflax']}, jax {e['jax']}, Python {e['python']}; {e['date']}, "
        f"{sum(document['seconds'].values()):.0f} s."
    )
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    lines = [
        textwrap.fill(note, 100, initial_indent="- ", subsequent_indent="  ") for note in notes
    ]
    return f"{table}\n\n" + "\n".join(lines) + "\n"


def page_with_figures(page: str, document: dict[str, Any]) -> str:
    """The page with what is between its markers replaced."""
    from benchmarks.pages import with_blocks

    return with_blocks(page, {"figures": rendered(document).removesuffix("\n")})


def measured(name: str) -> dict[str, Any]:
    """A rule's figures, from a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", name],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(names: Sequence[str], document: dict[str, Any]) -> dict[str, Any]:
    """The document with these rules measured anew."""
    rules, seconds = dict(document.get("rules", {})), dict(document.get("seconds", {}))
    found = document.get("environment")
    for name in names:
        start = time.perf_counter()
        done = measured(name)
        rules[name], seconds[name] = done["figures"], time.perf_counter() - start
        found = done["environment"] if name == names[0] else found
        sys.stderr.write(f"{seconds[name]:6.1f} s  {name}\n")
    return {"environment": found, "seconds": seconds, "rules": rules}


def main() -> None:
    parser = argparse.ArgumentParser(description="What each mistake of measuring costs here.")
    parser.add_argument("--only", metavar="NAME", choices=RULES, help="measure one rule again")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--one", metavar="NAME", choices=RULES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        info = environment()
        figures = RULES[args.one].measure()
        sys.stdout.write(json.dumps({"figures": figures, "environment": info}) + "\n")
        return
    document = {}
    if args.render or args.only:
        document = json.loads(FIGURES.read_text(encoding="utf-8"))
    if not args.render:
        names = [args.only] if args.only else [n for n in RULES if n not in SAME_RUNS]
        document = measure_all([SAME_RUNS.get(n, n) for n in names], document)
        FIGURES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with_figures(page, document), encoding="utf-8")


if __name__ == "__main__":
    main()
