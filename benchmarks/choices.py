"""What is chosen per platform, and the measurement that keeps it: a table per choice.

    python benchmarks/choices.py            measures, and writes figures and tables
    python benchmarks/choices.py --quick    measures tiny shapes once and prints; writes nothing
    python benchmarks/choices.py --render   writes the tables again from the saved figures

Every choice is measured in a process of its own without a compile cache, every XLA option too, in
front of whatever XLA_FLAGS says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import ExecutionOptions, Model, decode_step, new_cache, prefill
from rooflax.bench.environment import environment
from rooflax.bench.timing import timed
from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.ops.attention import xla as attention
from rooflax.ops.dot import FLOAT32
from rooflax.ops.moe import xla as moe

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
PAGE, FIGURES = ROOT / "docs" / "optimizations.md", ROOT / "docs" / "choices.json"

DEPTHS, QUICK_DEPTHS = (4, 8, 16, 32, 48), (2, 4)
PROMPT = 32
ROUNDS, QUICK_ROUNDS = 25, 2
ROUND_S, QUICK_ROUND_S = 0.02, 0.0
"""A variant's turn in a round lasts at least this long."""

PRECISIONS = ("default", "high", "highest")
XLA_OPTIONS = (
    "",
    "--xla_backend_optimization_level=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE",
    "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_RUNTIME",
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_use_thunk_runtime=false",
    "--xla_cpu_use_xnnpack=true",
    "--xla_cpu_prefer_vector_width=512",
    "--xla_cpu_enable_fast_min_max=true",
    "--xla_cpu_enable_fast_math=true",
    "",
)
"""Without any first and last: what the same setting differs by."""
MEDIUM = {
    "num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048,
    "num_attention_heads": 8,
}  # fmt: skip
"""Changes of qwen2.5-tiny: what XLA's options are measured on."""
QUICK_OPTIONS = ("", "--xla_llvm_disable_expensive_passes=true")

Figures = dict[str, Any]
Case = tuple[dict[str, Callable[..., jax.Array]], tuple[jax.Array, ...]]


def in_turns(variants: dict[str, Callable], args: Sequence[Any], quick: bool) -> dict[str, float]:
    """Median seconds of each variant's call; all take turns, so that drift meets all alike."""
    rounds, least = (QUICK_ROUNDS, QUICK_ROUND_S) if quick else (ROUNDS, ROUND_S)
    once = {name: min(timed(run, *args) for _ in range(3)) for name, run in variants.items()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            calls = max(1, int(least / once[name]))
            found[name].append(timed(_times, run, calls, *args) / calls)
    return {name: median(seconds) for name, seconds in found.items()}


def _times(run: Callable, count: int, *args: Any) -> Any:
    for _ in range(count - 1):
        jax.block_until_ready(run(*args))
    return run(*args)


# Layers: unrolled or scanned.


def tiny(num_layers: int) -> Model:
    """The architecture of Qwen 2.5 at width 128, this deep."""
    return qwen2(256, num_hidden_layers=num_layers)


def qwen2(max_model_len: int, **sizes: int) -> Model:
    name, config = read_config(PRESETS["qwen2.5-tiny"] | sizes)
    return build(name, config, random_weights(name, config), max_model_len)


def programs(model: Model, how: str) -> dict[str, Callable[[], Any]]:
    """Tracing and compiling of a prompt's and of a decode step's program."""
    options = ExecutionOptions(layers=how)
    model = model.stacked() if how == "scan" else model
    cache = new_cache(model, max_tokens=256, options=options)
    tokens, one = jnp.zeros((1, PROMPT), jnp.int32), jnp.zeros(1, jnp.int32)

    def lowered(step: Callable, *args: Any) -> Any:
        run = jax.jit(lambda *args: step(*args, options=options), donate_argnums=1)
        return run.lower(model, cache, *args)

    return {
        "prompt": lambda: lowered(prefill, tokens),
        "decode": lambda: lowered(decode_step, one, one),
    }


def num_instructions(compiled: Any) -> int:
    """Of an optimised program, with those inside its fusions and loops."""
    return len(re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = ", compiled.as_text(), re.MULTILINE))


def measure_layers(quick: bool) -> list[Figures]:
    """Per depth and way: seconds from Python to a compiled program, and its instructions."""
    rows = []
    for lower in programs(tiny(1), "unrolled").values():  # the compiler's own start
        lower().compile()
    for depth in QUICK_DEPTHS if quick else DEPTHS:
        model = tiny(depth)
        for how in ("unrolled", "scan"):
            row: Figures = {"layers": depth, "how": how, "seconds": 0.0, "instructions": 0}
            for lower in programs(model, how).values():
                start = time.perf_counter()
                compiled = lower().compile()
                row["seconds"] += time.perf_counter() - start
                row["instructions"] += num_instructions(compiled)
            rows.append(row)
    return rows


# Contractions: the same sums, written in several ways. The first of each is what runs.


def normal(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def dot(a: jax.Array, b: jax.Array, contracted: Any, batch: Any = ((), ())) -> jax.Array:
    return jax.lax.dot_general(a, b, (contracted, batch), FLOAT32)


def einsum(text: str) -> Callable[..., jax.Array]:
    return lambda *operands: jnp.einsum(text, *operands, precision=FLOAT32)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=FLOAT32)


def scores(rows: int, seq: int, heads: int, group: int, keys: int, width: int) -> Case:
    """Queries with the keys of their group: [B, T, K, G, H] and [B, K, S, H]."""
    q, k = normal(rows, seq, heads, group, width, seed=1), normal(rows, heads, keys, width, seed=2)

    def batched(q: jax.Array, k: jax.Array) -> jax.Array:
        merged = q.swapaxes(1, 2).reshape(rows, heads, seq * group, width)
        return matmul(merged, k.swapaxes(2, 3)).reshape(rows, heads, seq, group, keys)

    def keys_first(q: jax.Array, k: jax.Array) -> jax.Array:
        return dot(k, q, ((3,), (4,)), ((0, 1), (0, 2))).transpose(0, 1, 3, 4, 2)

    queries_first = {
        "dot_general": lambda q, k: dot(q, k, ((4,), (3,)), ((0, 2), (0, 1))),
        "einsum": einsum("btkgh,bksh->bktgs"),
        "batched matmul": batched,
    }
    ways = (queries_first, {"keys first": keys_first})
    first, second = ways[::-1] if seq <= attention.FEW_QUERIES else ways
    return first | second, (q, k)


def weighted(rows: int, seq: int, heads: int, group: int, keys: int, width: int) -> Case:
    """The sum of values by the softmax's weights: [B, K, T, G, S] and [B, K, S, H]."""
    w, v = normal(rows, heads, seq, group, keys, seed=3), normal(rows, heads, keys, width, seed=4)

    def batched(w: jax.Array, v: jax.Array) -> jax.Array:
        merged = matmul(w.reshape(rows, heads, seq * group, keys), v)
        return merged.reshape(rows, heads, seq, group, width)

    return {
        "dot_general": lambda w, v: dot(w, v, ((4,), (2,)), ((0, 1), (0, 1))),
        "einsum": einsum("bktgs,bksh->bktgh"),
        "batched matmul": batched,
        "values first": lambda w, v: dot(v, w, ((2,), (4,)), ((0, 1), (0, 1))).transpose(
            0, 1, 3, 4, 2
        ),
    }, (w, v)


def product(rows: int, inner: int, outer: int) -> Case:
    """x @ w: the weight as it lies, or its transpose."""
    x, w = normal(rows, inner, seed=5), normal(inner, outer, seed=6)
    return {
        "dot_general": lambda x, w, _: dot(x, w, ((1,), (0,))),
        "einsum": lambda x, w, _: einsum("ri,io->ro")(x, w),
        "matmul": lambda x, w, _: matmul(x, w),
        "weight first": lambda x, w, _: dot(w, x, ((0,), (1,))).T,
        "weight transposed": lambda x, _, t: dot(x, t, ((1,), (1,))),
    }, (x, w, w.T.copy())


def experts(tokens: int, chosen: int, count: int, inner: int, outer: int) -> Case:
    """Of pairs sorted by expert, each row with its expert's weight."""
    pairs = tokens * chosen
    ids = np.sort(np.random.default_rng(7).integers(0, count, pairs)).astype(np.int32)
    sizes = jnp.asarray(np.bincount(ids, minlength=count), jnp.int32)
    x, w = normal(pairs, inner, seed=8), normal(count, inner, outer, seed=9)
    tile = moe._tile_size(pairs, count)

    def tiles(x: jax.Array, w: jax.Array, ids: jax.Array, _: jax.Array) -> jax.Array:
        of_tile, slot, used = moe.plan(ids, count, tile)
        placed = jnp.zeros((of_tile.shape[0] * tile, inner)).at[slot].set(x)

        def run(index: jax.Array, out: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(placed, index * tile, tile)
            y = dot(rows, w[of_tile[index]], ((1,), (0,)))
            return jax.lax.dynamic_update_slice_in_dim(out, y, index * tile, 0)

        return jax.lax.fori_loop(0, used, run, jnp.zeros((placed.shape[0], outer)))[slot]

    def dense(x: jax.Array, w: jax.Array, ids: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.take_along_axis(einsum("pi,eio->peo")(x, w), ids[:, None, None], 1)[:, 0]

    variants = {
        f"tiles of {tile}": tiles,
        "ragged_dot": lambda x, w, _, sizes: jax.lax.ragged_dot(x, w, sizes, precision=FLOAT32),
        "every expert": dense,
    }
    if tokens == 1:  # of a prompt the gathered weights would be gigabytes
        variants["gathered weights"] = lambda x, w, ids, _: einsum("pi,pio->po")(x, w[ids])
    return variants, (x, w, jnp.asarray(ids), sizes)


CASES: dict[str, tuple[Callable[..., Case], tuple[int, ...], tuple[int, ...]]] = {
    "scores, decode": (scores, (1, 1, 8, 4, 1024, 64), (1, 1, 2, 3, 16, 8)),
    "scores, prompt": (scores, (1, 128, 8, 4, 1024, 64), (1, 9, 2, 3, 16, 8)),
    "weighted values, decode": (weighted, (1, 1, 8, 4, 1024, 64), (1, 1, 2, 3, 16, 8)),
    "weighted values, prompt": (weighted, (1, 128, 8, 4, 1024, 64), (1, 9, 2, 3, 16, 8)),
    "linear, decode": (product, (1, 1024, 4096), (1, 16, 24)),
    "linear, prompt": (product, (128, 1024, 4096), (4, 16, 24)),
    "experts, decode": (experts, (1, 4, 32, 512, 1024), (1, 2, 4, 16, 24)),
    "experts, prompt": (experts, (128, 4, 32, 512, 1024), (6, 2, 4, 16, 24)),
}
"""Name, how it is made, its shape and the quick one."""


def measure_contractions(quick: bool) -> list[Figures]:
    """Per contraction the seconds of every way to write it, the one that runs first."""
    rows = []
    for name, (make, shape, small) in CASES.items():
        variants, args = make(*(small if quick else shape))
        compiled = {key: jax.jit(run) for key, run in variants.items()}
        wanted, *others = (np.asarray(run(*args)) for run in compiled.values())
        for found in others:
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
        rows.append({"what": name, "seconds": in_turns(compiled, args, quick)})
    return rows


def measure_precision(quick: bool) -> list[Figures]:
    """Per precision a float32 product's seconds and its error against float64."""
    rows = []
    for seq in (1, 128):
        x, w = (normal(*s, seed=5) for s in (((seq, 32), (32, 48)) if quick else _product(seq)))
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        runs = {p: jax.jit(lambda x, w, p=p: jnp.matmul(x, w, precision=p)) for p in PRECISIONS}
        seconds = in_turns(runs, (x, w), quick)
        for name, run in runs.items():
            error = np.sqrt(((np.asarray(run(x, w)) - exact) ** 2).mean() / (exact**2).mean())
            row = {"rows": seq, "precision": name, "seconds": seconds[name], "error": float(error)}
            rows.append(row)
    return rows


def _product(rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rows, 1024), (1024, 4096)


# XLA's options: each in a process of its own, with plain XLA's operations, which they are about.


def measure_step(quick: bool) -> Figures:
    """Compile seconds of both programs and seconds of a step, with this process's XLA_FLAGS."""
    sizes = {"num_hidden_layers": 2} if quick else MEDIUM
    model = qwen2(512, **sizes)
    options = ExecutionOptions(kernels="xla")
    cache = new_cache(model, max_tokens=512)
    tokens, one = jnp.zeros((1, PROMPT * 4), jnp.int32), jnp.zeros(1, jnp.int32)
    found: Figures = {"compile_s": 0.0}
    for name, step, args in (
        ("prompt_s", prefill, (tokens,)),
        ("step_s", decode_step, (one, one + 200)),
    ):
        run = jax.jit(lambda m, c, *args, step=step: step(m, c, *args, options=options)[0])
        start = time.perf_counter()
        compiled = run.lower(model, cache, *args).compile()
        found["compile_s"] += time.perf_counter() - start
        found[name] = in_turns({"": compiled}, (model, cache, *args), quick)[""]
        logits = np.asarray(compiled(model, cache, *args))
        found[name.replace("_s", "_bits")] = hash(logits.tobytes())
    return found


def measure_xla(quick: bool) -> list[Figures]:
    """Per option of XLA; the first row is without any, and so is the last."""
    return [
        {"option": option, **apart("step", quick, option)}
        for option in (QUICK_OPTIONS if quick else XLA_OPTIONS)
    ]


PARTS: dict[str, Callable[[bool], Any]] = {
    "layers": measure_layers,
    "contractions": measure_contractions,
    "precision": measure_precision,
    "step": measure_step,
}


def apart(part: str, quick: bool, option: str = "") -> Any:
    """A part's figures from a new process, with an XLA option in front of the user's."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", part, *(["--quick"] if quick else [])],
        env=os.environ
        | {
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONHASHSEED": "0",
            "XLA_FLAGS": f"{option} {os.environ.get('XLA_FLAGS', '')}".strip(),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{part} {option}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def measure(quick: bool) -> Figures:
    start = time.perf_counter()
    return {
        "environment": environment(),
        "platform": jax.default_backend(),
        **{name: apart(name, quick) for name in ("layers", "contractions", "precision")},
        "xla": measure_xla(quick),
        "seconds": time.perf_counter() - start,
    }


# The page.


def blocks(figures: Figures) -> dict[str, str]:
    """The generated parts of the page by name; a function of the figures alone."""
    return {
        "choices-environment": about(figures),
        "choices-layers": layers_table(figures["layers"]),
        "choices-contractions": contractions_table(figures["contractions"]),
        "choices-precision": precision_table(figures["precision"]),
        "choices-xla": xla_table(figures["xla"]),
    }


def about(figures: Figures) -> str:
    e, platform = figures["environment"], figures["platform"]
    others = " and ".join(sorted({"cpu", "gpu", "tpu"} - {platform}))
    return (
        f"{e['cpu']}, {e['threads']} threads, load average {e['load_average']} at the start; jax "
        f"{e['jax']}; {e['date']}.\nMeasured on {platform}; {others} are not measured."
    )


def table(*rows: Sequence[str]) -> str:
    """A Markdown table, header first; figures to the right."""
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def layers_table(rows: list[Figures]) -> str:
    by = {(row["layers"], row["how"]): row for row in rows}
    ways = ("unrolled", "scan")
    lines = [
        (
            str(depth),
            *(f"{by[depth, how]['seconds']:.2f} s" for how in ways),
            *(f"{by[depth, how]['instructions']:,}" for how in ways),
        )
        for depth in sorted({row["layers"] for row in rows})
    ]
    head = ("layers", *(f"compile, {how}" for how in ways), *(f"instructions, {h}" for h in ways))
    return table(head, *lines)


def contractions_table(rows: list[Figures]) -> str:
    lines = []
    for row in rows:
        runs, *others = row["seconds"].items()
        shown = ", ".join(f"{name} {spent / runs[1]:.2f}" for name, spent in others)
        lines.append((row["what"], runs[0], duration(runs[1]), shown))
    return table(("contraction", "what runs", "time", "others, times as long"), *lines)


def precision_table(rows: list[Figures]) -> str:
    lines = [
        (
            f"{row['rows']} x 1,024 by 1,024 x 4,096",
            row["precision"],
            duration(row["seconds"]),
            f"{row['error']:.1e}",
        )
        for row in rows
    ]
    return table(("float32 product", "precision", "time", "rms error / rms"), *lines)


def xla_table(rows: list[Figures]) -> str:
    first = rows[0]
    lines = []
    for row in rows:
        same = all(row[k] == first[k] for k in ("prompt_bits", "step_bits"))
        lines.append(
            (
                f"`{row['option']}`" if row["option"] else "none",
                f"{row['compile_s']:.2f} s",
                duration(row["step_s"]),
                duration(row["prompt_s"]),
                "same" if same else "others",
            )
        )
    return table(("XLA option", "compile", "decode step", "prompt of 128", "bits"), *lines)


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def page_with_figures(page: str, figures: Figures) -> str:
    """The page with what is between each pair of markers replaced."""
    from benchmarks.pages import with_blocks

    return with_blocks(page, blocks(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="tiny shapes; writes nothing")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(PARTS[args.one](args.quick)) + "\n")
        return
    if args.quick:
        sys.stdout.write("\n\n".join(blocks(measure(quick=True)).values()) + "\n")
        return
    if not args.render:
        figures = measure(quick=False)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    page = page_with_figures(PAGE.read_text(encoding="utf-8"), figures)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
