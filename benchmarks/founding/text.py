"""Figures as words: numbers, Markdown tables, and sentences that the figures choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rooflax.bench.statistics import NOISY

Row = Mapping[str, Any]

UNCOUNTED = "dispatch of single operations, copies and intermediates"
UNCOUNTED_JITTED = "dispatch of programs, padding, copies and intermediates"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullets(sentences: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def number(value: float) -> str:
    """Three significant digits or so: 0.39, 24.5, 713."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def times(value: float) -> str:
    """A ratio: "16.3x"."""
    return f"{number(value)}x"


def duration(seconds: float) -> str:
    """Seconds or milliseconds."""
    return f"{number(seconds)} s" if seconds >= 0.5 else f"{number(seconds * 1e3)} ms"


def median(row: Row, name: str = "tok_per_s") -> float:
    """The median of a row's trials."""
    return row[name]["median"]


def spread(row: Row, name: str = "tok_per_s") -> str:
    """Median, standard deviation where there are trials to have one, and how many there are."""
    found = row[name]
    count = len(found["trials"])
    deviation = f" ± {number(found['std'])}" if count > 1 else ""
    return f"{number(found['median'])}{deviation} ({count})"


def counts(counted: Mapping[str, float]) -> str:
    """Layer passes / operations / bytes, each as a ratio."""
    return " / ".join(times(counted[n]) for n in ("layer_passes", "operations", "bytes"))


def noisy(rows: Sequence[Row], name: str = "tok_per_s") -> list[str]:
    """A sentence that names the rows whose trials deviate too much; none where there are none."""
    found = [row["label"] for row in rows if row[name]["std"] > NOISY * row[name]["mean"]]
    if not found:
        return []
    return [
        (
            f"Noisy, with a standard deviation above {NOISY:.0%} of the mean: {'; '.join(found)}. "
            f"Trust these figures less."
        )
    ]


def difference(
    label: str,
    measured: float,
    theirs: str,
    counted: Mapping[str, float],
    uncounted: str = UNCOUNTED,
) -> str:
    """What was measured against theirs, and how far the counts explain it.

    Args:
        theirs: their figure in words, e.g. "16.32x in theirs".
        uncounted: what else takes time.
    """
    explanation = explained(measured, counted, uncounted)
    return f"**{label}**: {times(measured)} here, {theirs}. {explanation}"


def explained(measured: float, counted: Mapping[str, float], uncounted: str = UNCOUNTED) -> str:
    """One sentence: where a speed-up lies among the counted ratios of operations and bytes."""
    operations, num_bytes = counted["operations"], counted["bytes"]
    low, high = sorted((operations, num_bytes))
    counted_as = f"{times(operations)} in operations and {times(num_bytes)} in bytes"
    if measured > high:
        return (
            f"Counted are {counted_as}; the {times(measured / high)} beyond that is saved on what "
            f"no count holds: {uncounted}."
        )
    if measured < low:
        return (
            f"Counted are {counted_as}; less came of it, so time went to what no count holds: "
            f"{uncounted}."
        )
    return f"It lies between what is counted: {counted_as}."


def same_tokens(rows: Sequence[Row]) -> bool:
    """Whether all rows gave the same tokens, in all their trials."""
    return all(
        row["tokens"] == rows[0]["tokens"] and row.get("same_in_all_trials", True) for row in rows
    )
