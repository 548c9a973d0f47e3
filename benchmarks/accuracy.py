"""What each weight format costs in accuracy: the table of docs/quantization.md.

    python benchmarks/accuracy.py            measures, and writes figures and table
    python benchmarks/accuracy.py --render   writes the table again from the saved figures

The embedded model reads its held-out text in windows; every token is scored once, with at least
half a window before it. Perplexity, the mean KL divergence from the float32 model's next-token
distribution, and how often the most likely token is the same.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import Model, load, new_cache
from rooflax.bench.environment import environment
from rooflax.cli.windows import Window, windows
from rooflax.loading.model_info import model_info
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.ops import native
from rooflax.ops.format_names import FORMATS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "quantization.md"
FIGURES = ROOT / "docs" / "quantization.json"
TEXT = ROOT / "tests" / "data" / "python_held_out.txt"
WINDOW, STRIDE, BLOCK = 512, 256, 16
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Case:
    """A way to keep the weights and the cache."""

    name: str
    quantize: str | None
    kv_dtype: str = "float32"


CASES = (
    Case("float32", None),
    *(Case(name, name) for name in FORMATS),
    Case("w4a8, head w8a8", "int4+head=int8"),
    Case("float32, float16 KV cache", None, "float16"),
    Case("float32, int8 KV cache", None, "int8"),
    Case("w8a8, int8 KV cache", "w8a8", "int8"),
    Case("float32, fp8 KV cache", None, "fp8"),
)


@jax.jit
def log_probs(model: Model, cache: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """[tokens, vocab]: of the token after each."""
    seq = tokens.shape[1]
    table = jnp.arange(1, 1 + -(-seq // BLOCK), dtype=jnp.int32)[None]
    first = jnp.zeros(1, jnp.int32)
    batch = Batch.ragged(tokens[0], first, length, first, (table,), (first,), longest=seq)
    hidden, _ = model.forward(batch, cache, options=ExecutionOptions())
    return jax.nn.log_softmax(model.logits(hidden)[0])


def score(case: Case, ids: list[int], cut: list[Window]) -> tuple[list[np.ndarray], int]:
    """Per window the log-probabilities of its scored tokens' distributions, and weight bytes."""
    model = load(None, quantize=case.quantize)
    found = []
    for window in cut:
        tokens = np.zeros((1, WINDOW), np.int32)
        part = ids[window.start : window.end]
        tokens[0, : len(part)] = part
        cache = new_cache(model, 1, WINDOW, dtype=case.kv_dtype)
        out = np.asarray(log_probs(model, cache, tokens, np.array([len(part)], np.int32)))
        found.append(out[window.first - window.start - 1 : len(part) - 1])
    return found, model.weights_bytes


def measure() -> dict[str, Any]:
    """Every case against the first."""
    ids = model_info(None).tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    cut = windows(len(ids), WINDOW, STRIDE)
    targets = [np.array(ids[w.first : w.end]) for w in cut]
    rows: list[dict[str, Any]] = []
    exact: list[np.ndarray] = []
    for case in CASES:
        logs, num_bytes = score(case, ids, cut)
        exact = exact or logs
        count = sum(len(t) for t in targets)
        loss = -sum(
            float(log[np.arange(len(t)), t].sum(dtype="float64"))
            for log, t in zip(logs, targets, strict=True)
        )
        pairs = list(zip(exact, logs, strict=True))
        kl = sum(float((np.exp(p) * (p - q)).sum(dtype="float64")) for p, q in pairs)
        same = sum(int((p.argmax(1) == q.argmax(1)).sum()) for p, q in pairs)
        rows.append(
            {
                "case": case.name,
                "weights_bytes": num_bytes,
                "perplexity": math.exp(loss / count),
                "kl_divergence": kl / count,
                "same_argmax": same / count,
            }
        )
        print(rows[-1])
    library = native.status().reason
    return {"environment": environment(), "kernels": library, "tokens": count, "rows": rows}


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = figures["rows"]
    base = rows[0]["perplexity"]
    lines = [
        "| weights | MiB | perplexity | change | KL divergence (nats) | same most likely token |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        change = 100 * (row["perplexity"] / base - 1)
        lines.append(
            f"| {row['case']} | {row['weights_bytes'] / 2**20:.1f} | {row['perplexity']:.3f} "
            f"| {change:+.2f}% | {row['kl_divergence']:.5f} | {100 * row['same_argmax']:.2f}% |"
        )
    return "\n".join([*lines, "", f"{figures['tokens']:,} tokens in windows of {WINDOW}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--render", action="store_true")
    if not parser.parse_args().render:
        FIGURES.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(figures)}\n{END}{after}", encoding="utf-8")
    print(table(figures))


if __name__ == "__main__":
    main()
