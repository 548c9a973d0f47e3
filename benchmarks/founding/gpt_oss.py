"""GPT-OSS, small, on CPU: one option after the other; and the KV cache over context lengths."""

from __future__ import annotations

from typing import Any

from benchmarks.founding import text
from benchmarks.founding.apart import apart
from benchmarks.founding.counted import count, padded_length
from benchmarks.founding.settings import BASELINE, PLAIN, Settings, Shape

STEPS = (
    ("baseline", {}, "1.0x"),
    ("+ GQA", {"gqa": "grouped"}, "1.05x"),
    ("+ MoE grouping", {"moe": "grouped"}, "1.15x"),
    ("+ KV cache", {"use_cache": True}, "50x"),
    ("+ jit", {"jit": True}, "1.1x"),
    ("default settings", {"kernels": None}, ""),
)
"""In their order, in plain JAX; the last row has the default settings."""
CURVE = "images/founding-kv-curve.png"
"""The drawn curve, beside the page."""

SLOWEST = {**BASELINE, "gqa": "repeat", "moe": "per_token"}


def measure(settings: Settings) -> dict[str, Any]:
    """The ladder, and the curve."""
    return {"ladder": _ladder(settings), "curve": _curve(settings)}


def _ladder(settings: Settings) -> dict[str, Any]:
    options, rows, counted = dict(SLOWEST), [], []
    for label, change, theirs in STEPS:
        options |= change
        # A trial of the slowest rows takes a good part of a minute: one must do.
        slow = options["moe"] == "per_token"
        trials = 1 if slow else settings.trials if options["jit"] else settings.eager_trials
        work = settings.gpt_oss.work(trials, **options)
        counted.append(count(work).later)
        rows.append({"label": label, "theirs": theirs, **apart("cell", work, label)})
    for index, row in enumerate(rows):
        before = max(index - 1, 0)
        row["step"] = _ratio(row, rows[before])
        row["ratio"] = _ratio(row, rows[0])
        row["all_ratio"] = text.median(row) / text.median(rows[0])
        row["step_counted"] = counted[before].over(counted[index])
        row["counted"] = counted[0].over(counted[index])
    jitted = settings.gpt_oss.work(settings.trials, **PLAIN)
    uncached = {
        "label": "no cache, jit, exact lengths",
        **apart("loop", jitted, "no cache, jit, exact lengths", name="uncached"),
    }
    uncached["ratio"] = _ratio(uncached, rows[0])
    return {"rows": rows, "uncached": uncached, "same_tokens": text.same_tokens([*rows, uncached])}


def _ratio(row: dict[str, Any], base: dict[str, Any]) -> float:
    """Of later tokens, to which their factor for the cache applies."""
    return text.median(row, "decode_tok_per_s") / text.median(base, "decode_tok_per_s")


def _curve(settings: Settings) -> dict[str, Any]:
    new = settings.context_output
    points = []
    for context in settings.contexts:
        shape = Shape(settings.gpt_oss.model, context - new, new)
        on_work, off_work = (shape.work(settings.trials, use_cache=use) for use in (True, False))
        off, on = (
            apart("cell", work, f"context {context}, cache {name}")
            for work, name in ((off_work, "off"), (on_work, "on"))
        )
        padded = padded_length(context)
        counted = [count(off_work, padded), count(on_work)]
        point = {
            "context": context,
            "padded_to": padded,
            "off": off,
            "on": on,
            "ttft_ratio": text.median(off, "ttft_s") / text.median(on, "ttft_s"),
            "later_ratio": _ratio(on, off),
            "counted_first": counted[0].first.over(counted[1].first),
            "counted_later": counted[0].later.over(counted[1].later),
        }
        sides = [off, on]
        if padded > context:
            label = f"context {context}, cache off, not padded"
            point["exact"] = apart("loop", off_work, label, name="uncached")
            point["exact_later_ratio"] = _ratio(on, point["exact"])
            sides.append(point["exact"])
        point["same_tokens"] = text.same_tokens(sides)
        points.append(point)
    return {"points": points, "output_tokens": new}


def totals(found: dict[str, Any]) -> tuple[float, float]:
    """(default against the baseline, default against the jitted run without a cache)."""
    default, uncached = found["ladder"]["rows"][-1], found["ladder"]["uncached"]
    return default["ratio"], default["ratio"] / uncached["ratio"]


def markdown(found: dict[str, Any], settings: dict[str, Any]) -> str:
    """Both tables and their sentences, and the drawn curve."""
    shape = settings["gpt_oss"]
    about_ladder = (
        f"{shape['prompt_tokens']} prompt tokens, {shape['output_tokens']} new ones, greedy, "
        f"float32, warm. Speeds and ratios are those of later tokens, to which their factor for "
        f"the cache applies. In brackets the number of trials; counted are layer passes / "
        f"operations / bytes of the row before over this one's."
    )
    about_curve = (
        f"The context is the prompt and {found['curve']['output_tokens']} new tokens, jitted, each "
        f"side in its own process. Without a cache every step runs the whole context, padded to "
        f"{padded_length(1)} tokens or a power of two above. Counted as above, with the padding."
    )
    return "\n\n".join(
        [
            f"## {shape['model']}: one option after the other",
            about_ladder,
            _ladder_table(found["ladder"], shape),
            "### The KV cache over lengths of context",
            about_curve,
            f"![Time to first token, and later tokens per second, cache on and off]({CURVE})",
            _curve_table(found["curve"]),
        ]
    )


def _ladder_table(ladder: dict[str, Any], shape: dict[str, Any]) -> str:
    head = (
        "setting", "later tok/s", "step", "counted for the step", "theirs", "in all",
        "TTFT", "compilations",
    )  # fmt: skip
    rows = ladder["rows"]
    cells = [
        (
            row["label"],
            text.spread(row, "decode_tok_per_s"),
            text.times(row["step"]),
            text.counts(row["step_counted"]),
            row["theirs"],
            text.times(row["ratio"]),
            text.duration(text.median(row, "ttft_s")),
            str(row["cold"]["compilations"]),
        )
        for row in rows
    ]
    last, uncached = rows[-1], ladder["uncached"]
    longest = shape["prompt_tokens"] + shape["output_tokens"]
    sentences = [
        *(
            text.difference(
                row["label"], row["step"], f"{row['theirs']} in theirs", row["step_counted"]
            )
            for row in rows[1:-1]
        ),
        (
            f"**in all**: {text.times(last['ratio'])} here, about 60x in theirs (their factors "
            f"multiply to {text.times(1.05 * 1.15 * 50 * 1.1)}); with the first token in it "
            f"{text.times(last['all_ratio'])}. {text.explained(last['ratio'], last['counted'])}"
        ),
        (
            f"Against a jitted run without a cache, every length its own program, the default is "
            f"{text.times(last['ratio'] / uncached['ratio'])} as fast."
        ),
        (
            f"Their 50x names no length of context; here it ends at {longest} tokens, and the "
            f"curve below goes on."
        ),
        *text.noisy([*rows, uncached], "decode_tok_per_s"),
    ]
    return text.table(head, cells) + "\n\n" + text.bullets(sentences)


def _curve_table(curve: dict[str, Any]) -> str:
    head = (
        "context", "TTFT off", "TTFT on", "ratio", "counted", "later tok/s off", "later tok/s on",
        "ratio", "counted",
    )  # fmt: skip
    cells = [
        (
            str(point["context"]),
            text.duration(text.median(point["off"], "ttft_s")),
            text.duration(text.median(point["on"], "ttft_s")),
            text.times(point["ttft_ratio"]),
            text.counts(point["counted_first"]),
            text.spread(point["off"], "decode_tok_per_s"),
            text.spread(point["on"], "decode_tok_per_s"),
            text.times(point["later_ratio"]),
            text.counts(point["counted_later"]),
        )
        for point in curve["points"]
    ]
    return text.table(head, cells) + "\n\n" + text.bullets(_curve_sentences(curve["points"]))


def _curve_sentences(points: list[dict[str, Any]]) -> list[str]:
    later = [point["later_ratio"] for point in points]
    reached = [str(p["context"]) for p in points if p["later_ratio"] >= 50]
    theirs = "Theirs is 50x to 100x for later tokens; "
    if reached:
        theirs += f"here at least 50x is reached at {', '.join(reached)} tokens of context."
    else:
        theirs += f"here the most is {text.times(max(later))}, and 50x is reached nowhere."
    first = [point["ttft_ratio"] for point in points]
    sentences = [
        theirs,
        (
            f"In theirs the first token takes as long with a cache as without; here it takes "
            f"{text.times(min(first))} to {text.times(max(first))} as long without. The two sides "
            f"pad the prompt differently and cut it into different pieces."
        ),
    ]
    for point in points:
        if "exact" in point:
            sentences.append(
                f"At {point['context']} tokens the side without a cache runs {point['padded_to']}; "
                f"not padded, with a program for every length, the cache's ratio is "
                f"{text.times(point['exact_later_ratio'])}."
            )
    rows = [
        {"label": f"{p['context']}, cache {side}", **p[side]}
        for p in points
        for side in ("off", "on")
    ]
    return [*sentences, *text.noisy(rows, "decode_tok_per_s")]
