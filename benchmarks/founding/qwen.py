"""Qwen 2.5: the old method against the new one, with compilation in both; then warm."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.founding import text
from benchmarks.founding.apart import apart
from benchmarks.founding.counted import count
from benchmarks.founding.settings import BASELINE, PLAIN, Settings, Shape

OLD, NEW = "old method", "new method"
OLD_LOOP = "recomputed_rope"
COMPILING = "compilation and dispatch"
EXPECTED = {
    50: ("10 to 15 min", "1 to 2 min", "8x to 10x"),
    100: ("30 to 40 min", "3 to 5 min", "10x to 15x"),
}
"""Of the full shape; forecasts, not measurements."""


def measure(settings: Settings) -> dict[str, Any]:
    """The small shape in several fresh processes per side, warm rows, and the full shape."""
    small = _small(settings)
    return {
        "small": small,
        "warm": _warm(settings, small["old"][0]),
        "full": [_full(shape, settings) for shape in settings.qwen_full],
    }


def _small(settings: Settings) -> dict[str, Any]:
    """Old and new in turn, each time in a fresh process."""
    old, new = [], []
    for _ in range(settings.processes):
        work = settings.qwen.work(settings.trials)
        plain = settings.qwen.work(settings.trials, **PLAIN)
        old.append(apart("loop", plain, OLD, name=OLD_LOOP))
        new.append(apart("request", work, NEW))
    seconds = [median(run["cold"]["seconds"] for run in side) for side in (old, new)]
    return {
        "old": old,
        "new": new,
        "ratio": seconds[0] / seconds[1],
        "counted": _counted(settings.qwen),
        "same_tokens": text.same_tokens([*old, *new]),
    }


def _counted(shape: Shape) -> dict[str, float]:
    return count(shape.work(1, use_cache=False)).all.over(count(shape.work(1)).all)


def _warm(settings: Settings, old: dict[str, Any]) -> dict[str, Any]:
    """What remains once everything is compiled."""
    work, counted = settings.qwen.work, _counted(settings.qwen)
    same = dict.fromkeys(counted, 1.0)
    eager = work(settings.eager_trials, **BASELINE)
    rows = [
        {"label": "no cache, no jit", "counted": same, **apart("cell", eager, "no cache, no jit")},
        {"label": "old method", "counted": same, **old},
        {
            "label": "old method, RoPE kept",
            "counted": same,
            **apart("loop", work(settings.trials, **PLAIN), "RoPE kept", name="uncached"),
        },
        {"label": "default", "counted": counted, **apart("cell", work(settings.trials), "default")},
    ]
    for row in rows:
        row["ratio"] = text.median(row) / text.median(rows[0])
    return {"rows": rows, "same_tokens": text.same_tokens(rows)}


def _full(shape: Shape, settings: Settings) -> dict[str, Any]:
    """One process per side for the cold runs, whose old side also gives the warm trials."""
    label = f"{shape.model}, {shape.output_tokens} tokens"
    work = shape.work(settings.eager_trials)
    plain = shape.work(settings.eager_trials, **PLAIN)
    old = apart("loop", plain, f"{label}, {OLD}", name=OLD_LOOP)
    new = apart("request", work, f"{label}, {NEW}")
    warm = apart("cell", work, f"{label}, default, warm")
    return {
        "output_tokens": shape.output_tokens,
        "old": old,
        "new": new,
        "warm": warm,
        "ratio": old["cold"]["seconds"] / new["cold"]["seconds"],
        "warm_ratio": text.median(warm) / text.median(old),
        "counted": _counted(shape),
        "same_tokens": text.same_tokens([old, new, warm]),
    }


def totals(found: dict[str, Any]) -> tuple[float, float]:
    """(new against old with compilation in both, default against the jitted old method, warm)."""
    rows = {row["label"]: row for row in found["warm"]["rows"]}
    return found["small"]["ratio"], rows["default"]["ratio"] / rows["old method"]["ratio"]


def markdown(found: dict[str, Any], settings: dict[str, Any]) -> str:
    """The three tables and their sentences."""
    shape = settings["qwen"]
    info = (
        f"{shape['prompt_tokens']} prompt tokens, {shape['output_tokens']} new ones, greedy, "
        f"float32. A fresh process without a compile cache; the clock runs from the request to "
        f"the last token, loading apart. Old: jit, RoPE for every position computed again in "
        f"every layer, no cache, a new shape for every token. Medians over "
        f"{len(found['small']['old'])} processes per side, taken in turn."
    )
    return "\n\n".join(
        [
            f"## {shape['model']}: old method against new, compilation included",
            info,
            _small_table(found["small"], shape["output_tokens"]),
            "### The same, warm",
            _warm_table(found["warm"]["rows"]),
            "### The full shape",
            _full_table(found["full"], settings["qwen_full"][0]["model"]),
        ]
    )


def _small_table(small: dict[str, Any], tokens: int) -> str:
    head = ("method", "time", "tok/s", "ratio", "compilations", "theirs")
    cells, shares = [], []
    for runs, label, ratio, theirs in (
        (small["old"], OLD, 1.0, "51.1 s, 0.39 tok/s, 1.0x"),
        (small["new"], NEW, small["ratio"], "12.8 s, 1.56 tok/s, 3.98x"),
    ):
        cold = {name: median(run["cold"][name] for run in runs) for name in runs[0]["cold"]}
        shares.append(cold["compile_s"] / cold["seconds"])
        cells.append(
            (
                label,
                text.duration(cold["seconds"]),
                text.number(tokens / cold["seconds"]),
                text.times(ratio),
                f"{cold['compilations']:.0f} in {text.duration(cold['compile_s'])}",
                theirs,
            )
        )
    sentences = [
        text.difference(NEW, small["ratio"], "3.98x in theirs", small["counted"], COMPILING),
        (
            f"Compiling is {shares[0]:.0%} of the old method's time and {shares[1]:.0%} of the new "
            f"one's; warm, the methods differ as below."
        ),
    ]
    return text.table(head, cells) + "\n\n" + text.bullets(sentences)


def _warm_table(rows: list[dict[str, Any]]) -> str:
    head = ("setting", "tok/s, all tokens", "ratio", "counted")
    cells = [
        (row["label"], text.spread(row), text.times(row["ratio"]), text.counts(row["counted"]))
        for row in rows
    ]
    _, old, kept, default = rows
    sentences = [
        (
            f"**RoPE kept** instead of computed again: {text.times(kept['ratio'] / old['ratio'])}; "
            f"theirs does not measure it alone."
        ),
        text.difference(
            "default against the jitted old method", default["ratio"] / old["ratio"],
            "not measured in theirs", default["counted"], text.UNCOUNTED_JITTED,
        ),
        *text.noisy(rows),
    ]  # fmt: skip
    return text.table(head, cells) + "\n\n" + text.bullets(sentences)


def _full_table(full: list[dict[str, Any]], model: str) -> str:
    head = (
        "tokens", "old, cold", "new, cold", "ratio", "old, warm tok/s", "new, warm tok/s", "ratio",
        "counted", "theirs (expected): old, new, ratio",
    )  # fmt: skip
    cells, sentences = [], []
    for run in full:
        tokens = run["output_tokens"]
        expected = EXPECTED.get(tokens, ("nothing", "nothing", "nothing"))
        cells.append(
            (
                str(tokens),
                text.duration(run["old"]["cold"]["seconds"]),
                text.duration(run["new"]["cold"]["seconds"]),
                text.times(run["ratio"]),
                text.spread(run["old"]),
                text.spread(run["warm"]),
                text.times(run["warm_ratio"]),
                text.counts(run["counted"]),
                ", ".join(expected),
            )
        )
        sentences.append(
            text.difference(
                f"{tokens} tokens, cold", run["ratio"], f"{expected[2]} expected in theirs",
                run["counted"], COMPILING,
            )
        )  # fmt: skip
        sentences.append(
            f"**{tokens} tokens, warm**: {text.times(run['warm_ratio'])}. "
            + text.explained(run["warm_ratio"], run["counted"], text.UNCOUNTED_JITTED)
        )
    intro = f"`{model}`, one fresh process per side for the cold figures. Theirs are forecasts."
    return "\n\n".join([intro, text.table(head, cells), text.bullets(sentences)])
