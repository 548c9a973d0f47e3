"""How far each width and each implementation is from exact: the tables of docs/numerics.md.

    python benchmarks/numerics.py            measures, and writes figures and tables
    python benchmarks/numerics.py --render   writes the tables again from the saved figures

Operations are compared with float64 on random numbers; the embedded model with itself in float32 by
the reference kernels, on its held-out text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import load, new_cache
from rooflax.bench.environment import environment
from rooflax.loading.model_info import model_info
from rooflax.models.steps import prefill
from rooflax.nn.execution import ExecutionOptions
from rooflax.ops.attention import AttentionArgs, Dense, attention
from rooflax.ops.kernels import OPERATIONS
from rooflax.ops.linear import linear
from rooflax.ops.norm import rms_norm
from rooflax.ops.weights import quantize

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "numerics.md", ROOT / "docs" / "numerics.json"
TEXT = ROOT / "tests" / "data" / "python_held_out.txt"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
ROWS, INNER, OUTER, SEQ, HEADS, HEAD_DIM = 16, 4096, 1024, 256, 8, 64
TOKENS, WINDOWS = 256, 8
FORMATS = ("w8a16", "w8a8", "w4a16", "w4a8", "mxfp4-a16", "fp8-a16")


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error(found: Any, exact: np.ndarray) -> float:
    """Root mean square of the error over that of the exact values."""
    difference = np.asarray(found, np.float64) - exact
    return float(np.sqrt((difference**2).mean() / (exact**2).mean()))


def names() -> list[str]:
    """Implementations that are here."""
    return OPERATIONS["linear"].available()


def matmuls() -> list[dict[str, Any]]:
    x, w = normal(ROWS, INNER, seed=1), normal(INNER, OUTER, seed=2)
    exact = x.astype(np.float64) @ w
    rows = []
    for dtype in ("float32", "bfloat16"):
        for name in names():
            y = linear(jnp.asarray(x), jnp.asarray(w, dtype), implementation=name)
            rows.append({"what": f"matmul, weights {dtype}", "by": name, "error": error(y, exact)})
    narrow = jnp.asarray(x, "bfloat16"), jnp.asarray(w, "bfloat16")
    y = linear(*narrow, implementation="xla")
    rows.append({"what": "matmul, all bfloat16", "by": "xla", "error": error(y, exact)})
    for format in FORMATS:
        packed = quantize(w, format, (INNER,), (OUTER,))
        y = linear(jnp.asarray(x), packed)
        rows.append({"what": f"matmul, {format}", "by": names()[-1], "error": error(y, exact)})
    return rows


def others() -> list[dict[str, Any]]:
    q, k, v = (normal(1, SEQ, HEADS, HEAD_DIM, seed=s) for s in (3, 4, 5))
    scores = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k) / HEAD_DIM**0.5
    scores = np.where(np.tril(np.ones((SEQ, SEQ), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bnts,bsnh->btnh", shares / shares.sum(-1, keepdims=True), v)
    positions = jnp.arange(SEQ, dtype=jnp.int32)[None]
    dense = Dense(positions, positions, jnp.full(1, SEQ, jnp.int32), causal_order=True)
    args = AttentionArgs(HEAD_DIM**-0.5)
    rows = []
    for dtype in ("float32", "bfloat16"):
        arrays = (jnp.asarray(a, dtype) for a in (q, k.swapaxes(1, 2), v.swapaxes(1, 2)))
        out = attention(*arrays, dense, args, implementation="xla")
        rows.append({"what": f"attention, {dtype}", "by": "xla", "error": error(out, exact)})
        x = normal(ROWS, INNER, seed=6)
        scaled = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        out = rms_norm(jnp.asarray(x, dtype), jnp.ones(INNER, dtype), eps=1e-5)
        rows.append({"what": f"RMSNorm, {dtype}", "by": "xla", "error": error(out, scaled)})
    return rows


def model_logits(kernels: str | None, dtype: str, kv: str) -> np.ndarray:
    """[windows, vocab]: logits of the token after each window of held-out text."""
    model = load(None, dtype=dtype)
    ids = model_info(None).tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    options = ExecutionOptions(kernels=kernels)
    run = jax.jit(prefill, static_argnames="options")
    found = []
    for window in range(WINDOWS):
        tokens = jnp.asarray(ids[window * TOKENS : (window + 1) * TOKENS], jnp.int32)[None]
        cache = new_cache(model, 1, TOKENS, dtype=kv)
        found.append(np.asarray(run(model, cache, tokens, options=options)[0][0]))
    return np.stack(found)


def models() -> list[dict[str, Any]]:
    exact = model_logits("reference", "float32", "float32").astype(np.float64)
    cases = [("float32", name, "float32", "float32") for name in names() if name != "reference"]
    cases += [
        ("bfloat16 KV cache", None, "float32", "bfloat16"),
        ("int8 KV cache", None, "float32", "int8"),
        ("fp8 KV cache", None, "float32", "fp8"),
        ("all bfloat16", "xla", "bfloat16", "bfloat16"),
    ]
    rows = []
    for what, kernels, dtype, kv in cases:
        found = model_logits(kernels, dtype, kv)
        rows.append(
            {
                "what": what,
                "by": kernels or names()[-1],
                "error": error(found, exact),
                "largest": float(np.abs(found - exact).max()),
            }
        )
    return rows


def tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    platform = figures["platform"]
    others = " and ".join(sorted({"cpu", "gpu", "tpu"} - {platform}))
    about = (
        f"Measured on {platform}, JAX {figures['environment']['jax']}; {others} are not measured."
    )
    lines = [about, "", "| operation | by | rms error / rms |", "| --- | --- | ---: |"]
    lines += [f"| {r['what']} | {r['by']} | {r['error']:.1e} |" for r in figures["operations"]]
    lines += ["", "| embedded model | by | rms error / rms of logits | largest error |"]
    lines += ["| --- | --- | ---: | ---: |"]
    lines += [
        f"| {r['what']} | {r['by']} | {r['error']:.1e} | {r['largest']:.1e} |"
        for r in figures["models"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--render", action="store_true")
    if not parser.parse_args().render:
        figures = {
            "environment": environment(),
            "platform": jax.default_backend(),
            "operations": matmuls() + others(),
            "models": models(),
        }
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{tables(figures)}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
