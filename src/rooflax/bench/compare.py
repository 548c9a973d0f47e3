"""A against B: two saved documents, or two settings measured interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rooflax.bench.figures import MIN_PAIRS, Ratio, paired_ratio, unpaired_ratio
from rooflax.bench.measure import Bench
from rooflax.bench.trials import Job, warm_up
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.errors import EngineError, RequestError

QUANTITIES = ("prefill_tok_per_s", "decode_tok_per_s")
IDENTITY = ("model", "batch", "prompt_tokens", "output_tokens")
SETTINGS = ("options", "precision")


@dataclass(frozen=True)
class Comparison:
    """B over A.

    Attributes:
        label: the row.
        decode, prefill: ratios of speeds.
        same_tokens: whether both gave the same ids.
    """

    label: str
    decode: Ratio
    prefill: Ratio
    same_tokens: bool

    def as_json(self) -> dict[str, Any]:
        """The fields, each ratio with its interval and verdict."""
        return {
            "row": self.label,
            "decode": self.decode.as_json(),
            "prefill": self.prefill.as_json(),
            "same_tokens": self.same_tokens,
        }

    def lines(self) -> list[str]:
        """Lines for the terminal, one per quantity."""
        tokens = "the same tokens" if self.same_tokens else "different tokens"
        return [f"{self.label}: {tokens}"] + [
            f"  {name:<7}  {r.ratio:.3f}x  [{r.low:.3f}, {r.high:.3f}]  {r.verdict}"
            for name, r in (("prefill", self.prefill), ("decode", self.decode))
        ]


def versus(a: Workload, b: Workload, label: str) -> Comparison:
    """Both loaded at once, warmed up, and timed in pairs of alternating order.

    Raises:
        RequestError: fewer trials than a verdict needs.
    """
    if a.trials < MIN_PAIRS:
        raise RequestError(
            f"a comparison needs at least {MIN_PAIRS} trials; {a.trials} were asked for"
        )
    return interleaved([Bench(a).run, Bench(b).run], a, label)


def interleaved(jobs: list[Job], work: Workload, label: str) -> Comparison:
    """The comparison of two jobs of the same work."""
    for job in jobs:
        warm_up(job)
    timelines: tuple[list, list] = ([], [])
    for trial in range(work.trials):
        for side in (0, 1) if trial % 2 == 0 else (1, 0):
            with count_compilations() as compiled:
                timelines[side].append(jobs[side]())
            if compiled.requests:
                raise EngineError("something compiled while the clock ran; no figure is valid")
    decode = [[t.decode_tok_per_s for t in side] for side in timelines]
    prefill = [[t.prefill_tok_per_s(work.prompt_tokens) for t in side] for side in timelines]
    same = len({tuple(t.tokens) for side in timelines for t in side}) == 1
    return Comparison(label, paired_ratio(*decode), paired_ratio(*prefill), same)


def compare_documents(a: dict[str, Any], b: dict[str, Any]) -> list[Comparison]:
    """Rows that both documents hold; of one with the same settings, only against that.

    Their trials were not taken in pairs: what the machine did between the runs is in the ratio,
    which the caller must say.

    Raises:
        RequestError: no row in common, or too few trials.
    """
    rows = []
    for x in a["results"]:
        same_work = [y for y in b["results"] if _identity(x) == _identity(y)]
        same = [y for y in same_work if all(x.get(n) == y.get(n) for n in (*SETTINGS, "mesh"))]
        rows += [(x, y) for y in same or same_work]
    if not rows:
        raise RequestError("the two files have no row in common: model, batch or lengths differ")
    return [_compare_rows(x, y) for x, y in rows]


def _compare_rows(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    prefill, decode = (unpaired_ratio(a[name]["trials"], b[name]["trials"]) for name in QUANTITIES)
    return Comparison(_label(a, b), decode, prefill, a["tokens"] == b["tokens"])


def _identity(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in IDENTITY)


def _label(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The row, and what differs in its settings."""
    label = f"{a['model']} batch {a['batch']}, {a['prompt_tokens']} + {a['output_tokens']} tokens"
    pairs = [
        (name, a[group].get(name), b[group].get(name))
        for group in SETTINGS
        for name in sorted({*a[group], *b[group]})
    ]
    pairs.append(("mesh", a.get("mesh"), b.get("mesh")))
    changes = [f"{name} {x} -> {y}" for name, x, y in pairs if x != y]
    return f"{label} ({', '.join(changes)})" if changes else label
