"""GPT-2: {no cache, cache} x {no jit, jit}, and a warm-up that is too short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.founding import text
from benchmarks.founding.apart import apart
from benchmarks.founding.counted import count, padded_length
from benchmarks.founding.settings import BASELINE, PLAIN, Settings
from rooflax.nn.execution import Precision

THEIRS = {
    "no cache, no jit": "1.50 tok/s, 1.00x",
    "cache, jit": "24.45 tok/s, 16.32x",
    "default settings": "the same",
    "default settings, int8 weights": "24.45 tok/s, 16.32x (their full report: INT8 quantized)",
}
THEIR_TOTAL = 16.32
INT8 = (
    "The total compares with the int8 row: their full report gives 24.45 tok/s for GPT-2 with INT8 "
    "weights. Its tokens may differ from the float32 rows'; the float32 row stands above it."
)
THEIR_TRAP = {"tok_per_s": 4.23, "right_tok_per_s": 24.45, "ratio": 2.44, "said": 6.8}


def measure(settings: Settings) -> dict[str, Any]:
    """A process each: the default settings, the four cells in plain JAX, and two variations."""
    work, short = settings.gpt2.work, settings.short_warm_up
    jitted, eager = settings.trials, settings.eager_trials
    uncached, cached = work(1, use_cache=False), count(work(1)).all
    base = count(uncached).all
    longest = settings.gpt2.prompt_tokens + settings.gpt2.output_tokens
    padded = count(uncached, padded_length(longest)).all
    plain = work(jitted, **PLAIN)
    plan = (
        ("no cache, no jit", base, "cell", work(eager, **BASELINE), {}),
        ("no cache, jit", base, "loop", plain, {"name": "uncached", "short": short}),
        ("cache, no jit", cached, "cell", work(eager, jit=False, **PLAIN), {}),
        ("cache, jit", cached, "cell", plain, {}),
        ("no cache, jit, padded", padded, "cell", work(jitted, use_cache=False, **PLAIN), {}),
        (
            "growing cache, jit", cached, "loop", plain,
            {"name": "growing_cache", "short": short},
        ),
        ("default settings", cached, "cell", work(jitted), {}),
    )  # fmt: skip
    rows = [
        {"label": label, "counted": base.over(counted), **apart(job, row, label, **arguments)}
        for label, counted, job, row, arguments in plan
    ]
    narrow = replace(work(jitted), precision=Precision("float32", quantize="int8"))
    label = "default settings, int8 weights"
    int8 = {"label": label, "counted": base.over(cached), **apart("cell", narrow, label)}
    for row in (*rows, int8):
        row["ratio"] = text.median(row) / text.median(rows[0])
    return {"rows": rows, "int8": int8, "same_tokens": text.same_tokens(rows)}


def totals(found: dict[str, Any]) -> tuple[float, float]:
    """(int8 weights, as theirs had, against the baseline; float32 against the jitted baseline)."""
    rows = {row["label"]: row for row in found["rows"]}
    return found["int8"]["ratio"], rows["default settings"]["ratio"] / rows["no cache, jit"][
        "ratio"
    ]


def markdown(found: dict[str, Any], settings: dict[str, Any]) -> str:
    """Both tables and their sentences."""
    shape = settings["gpt2"]
    head = (
        "setting", "tok/s, all tokens", "ratio", "counted", "compilations", "compile", "theirs",
    )  # fmt: skip
    cells = [
        (
            row["label"],
            text.spread(row),
            text.times(row["ratio"]),
            text.counts(row["counted"]),
            str(row["cold"]["compilations"]),
            text.duration(row["cold"]["compile_s"]),
            THEIRS.get(row["label"], ""),
        )
        for row in (*found["rows"], found["int8"])
    ]
    info = (
        f"{shape['prompt_tokens']} prompt tokens, {shape['output_tokens']} new ones, greedy, "
        f"float32 in all but the last row, warm, and plain JAX in all but the last two. In "
        f"brackets the number of trials. "
        f"Compilations and their seconds are those of a process's first run; counted are layer "
        f"passes / operations / bytes of the first row over this one's."
    )
    return "\n\n".join(
        [
            f"## {shape['model']}: the four cells",
            info,
            text.table(head, cells),
            text.bullets(
                [*_cell_sentences(found["rows"]), INT8, *_compile_sentences(found["rows"])]
            ),
            "### The warm-up that is too short",
            _trap(found["rows"], shape["output_tokens"]),
        ]
    )


def _cell_sentences(rows: list[dict[str, Any]]) -> list[str]:
    base, jit, cache, both, *_, default = rows
    share = default["decode_roofline"]
    ceiling = text.median(default, "decode_tok_per_s") / share / text.median(base)
    return [
        (
            f"**no cache, no jit**: {text.number(text.median(base))} tok/s here, 1.50 in theirs; "
            f"their machine is not named, so ratios are compared, not speeds."
        ),
        text.difference("no cache, jit", jit["ratio"], "not measured in theirs", jit["counted"]),
        text.difference(
            "cache, no jit", cache["ratio"], "an estimate of 10x to 13x in theirs", cache["counted"]
        ),
        text.difference("cache, jit", both["ratio"], "16.32x in theirs", both["counted"]),
        text.difference(
            "default settings", default["ratio"], "16.32x in theirs", default["counted"]
        ),
        (
            f"The later tokens of **default settings** come at {share:.0%} of the speed at which "
            f"this machine can read the float32 weights; at all of it, and with nothing else to "
            f"do, they would come {text.times(ceiling)} as fast as the first row's."
        ),
        (
            f"Their count of 120 attentions against 15 leaves out the prompt; with it the layer "
            f"passes differ by {text.times(default['counted']['layer_passes'])}."
        ),
        *text.noisy(rows),
    ]


def _compile_sentences(rows: list[dict[str, Any]]) -> list[str]:
    _, jit, _, _, padded, growing, default = rows
    programs, passes = jit["cold"], 1 / padded["counted"]["layer_passes"]
    each = programs["compile_s"] / programs["compilations"]
    return [
        (
            f"A program of a new length took {text.duration(each)} to compile here; in theirs "
            f"0.5 to 2 s."
        ),
        (
            f"**no cache, jit, padded** is `--no-cache`: "
            f"{padded['cold']['compilations']} programs instead of {programs['compilations']}, for "
            f"{text.times(passes)} the layer passes."
        ),
        (
            f"**growing cache, jit** compiles for every length: "
            f"{growing['cold']['compilations']} programs against "
            f"{default['cold']['compilations']} of the default, with "
            f"{text.duration(growing['cold']['compile_s'])} against "
            f"{text.duration(default['cold']['compile_s'])} of compiling."
        ),
    ]


def _trap(rows: list[dict[str, Any]], tokens: int) -> str:
    base, jit, *_, growing, _ = rows
    short = growing["trap"]["warm_up_tokens"]
    head = (
        "jitted, every length a program", f"warm-up of {short}", "compilations while timed",
        f"warm-up of {tokens}", "theirs",
    )  # fmt: skip
    speed, right = text.median(base), THEIR_TRAP["right_tok_per_s"]
    wrong_ratio, right_ratio = (
        growing["trap"]["tok_per_s"] / jit["trap"]["tok_per_s"],
        text.median(growing) / text.median(jit),
    )
    cells = [
        *(
            (
                f"{row['label']}, tok/s",
                text.number(row["trap"]["tok_per_s"]),
                str(row["trap"]["compilations_while_timed"]),
                text.spread(row),
                theirs,
            )
            for row, theirs in ((jit, ""), (growing, f"{THEIR_TRAP['tok_per_s']} and {right}"))
        ),
        ("cache against no cache", text.times(wrong_ratio), "", text.times(right_ratio), ""),
        (
            "cache against no cache, no jit, warm",
            text.times(growing["trap"]["tok_per_s"] / speed),
            "",
            text.times(text.median(growing) / speed),
            "2.44x and 16.32x",
        ),
    ]
    error = text.median(growing) / growing["trap"]["tok_per_s"]
    their_errors = right / THEIR_TRAP["tok_per_s"], THEIR_TOTAL / THEIR_TRAP["ratio"]
    sentences = [
        (
            f"The short warm-up understates the cached loop by {text.times(error)}; theirs by "
            f"{text.times(their_errors[0])} in speed and {text.times(their_errors[1])} in ratio "
            f"(they say {THEIR_TRAP['said']}x)."
        ),
        (
            f"{growing['trap']['compilations_while_timed']} programs were compiled while its clock "
            f"ran, for {text.duration(growing['trap']['compile_s'])}; `rooflax bench` voids a "
            f"trial in which one is."
        ),
        "With the short warm-up there is one run: a process makes this mistake once.",
        "The default settings cannot fall into it: their shapes do not grow.",
    ]
    return text.table(head, cells) + "\n\n" + text.bullets(sentences)
