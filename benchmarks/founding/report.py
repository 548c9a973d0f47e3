"""The document of a run: put together, judged, and rendered as Markdown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.founding import forecasts, gpt2, gpt_oss, many_devices, memory, qwen, text, tpu_plan
from benchmarks.founding.settings import WANTED, Settings

Tables = dict[str, dict[str, Any]]
TOTALS = {"gpt2": gpt2.totals, "qwen2.5": qwen.totals, "gpt-oss": gpt_oss.totals}
ABOUT = {
    "gpt2": "all tokens, warm, int8 weights as in theirs, against eager float32 without a cache",
    "qwen2.5": "from request to last token, compilation included, against the old method",
    "gpt-oss": "later tokens, warm, against eager without a cache, K and V copied, MoE per token",
}


def document(
    settings: Settings, environment: dict[str, Any], tables: Tables, seconds: dict[str, float]
) -> dict[str, Any]:
    """Everything as one JSON document."""
    found = {name: total(tables[name]) for name, total in TOTALS.items()}
    return {
        "totals": {name: ratios[0] for name, ratios in found.items()},
        "like_for_like": {name: ratios[1] for name, ratios in found.items()},
        "wanted": WANTED,
        "environment": environment,
        "settings": asdict(settings),
        "seconds": seconds,
        "tables": tables,
    }


def failures(document: dict[str, Any]) -> list[str]:
    """What was promised and not found, a line each."""
    lines = [
        f"{name}: {text.times(document['totals'][name])} is below the {wanted}x that is wanted"
        for name, wanted in document["wanted"].items()
        if document["totals"][name] < wanted
    ]
    return lines + [f"{where}: the rows gave different tokens" for where in _unequal(document)]


def _unequal(document: dict[str, Any]) -> list[str]:
    """Tables whose float32 rows did not all give the same tokens."""
    tables = document["tables"]
    parts = {
        "gpt2": tables["gpt2"],
        "qwen2.5": tables["qwen2.5"]["small"],
        "qwen2.5, warm": tables["qwen2.5"]["warm"],
        **{f"qwen2.5, {run['output_tokens']} tokens": run for run in tables["qwen2.5"]["full"]},
        "gpt-oss": tables["gpt-oss"]["ladder"],
        **{f"gpt-oss at {p['context']}": p for p in tables["gpt-oss"]["curve"]["points"]},
    }
    return [name for name, part in parts.items() if not part["same_tokens"]]


def markdown(document: dict[str, Any]) -> str:
    """The page; a function of the document, and of what can be counted without a run."""
    tables, settings = document["tables"], document["settings"]
    environment = document["environment"]
    return (
        "\n\n".join(
            [
                "# The tables of the founding documents, measured here",
                (
                    "Written by `python -m benchmarks.founding`; do not edit. The figures in "
                    "founding-tables.json hold every trial."
                ),
                _totals(document),
                _head(document),
                gpt2.markdown(tables["gpt2"], settings),
                qwen.markdown(tables["qwen2.5"], settings),
                gpt_oss.markdown(tables["gpt-oss"], settings),
                memory.markdown(tables["memory"], settings),
                many_devices.markdown(),
                tpu_plan.markdown(),
                forecasts.markdown(
                    tables["forecasts"],
                    environment,
                    tables["gpt2"]["rows"][0],
                    settings["gpt2"]["model"],
                ),
            ]
        ).rstrip()
        + "\n"
    )


def _totals(document: dict[str, Any]) -> str:
    rows = [
        (
            name,
            text.times(wanted),
            text.times(document["totals"][name]),
            "met" if document["totals"][name] >= wanted else "MISSED",
            text.times(document["like_for_like"][name]),
            ABOUT[name],
        )
        for name, wanted in document["wanted"].items()
    ]
    unequal = _unequal(document)
    tokens = (
        f"The rows of {', '.join(unequal)} gave DIFFERENT tokens, which none may."
        if unequal
        else "All float32 rows of a table gave the same tokens."
    )
    head = ("total", "theirs", "here", "", "like for like", "what is compared")
    return "\n\n".join(
        [
            text.table(head, rows),
            "The default settings against the slowest method, as in theirs. Like for like, the "
            "other side is jitted float32 as well, warm, without a cache and without padding. "
            + tokens,
        ]
    )


def _head(document: dict[str, Any]) -> str:
    e = document["environment"]
    clock = f"{e['clock_mhz']:.0f} MHz" if e["clock_mhz"] else "unknown"
    flags = f", XLA_FLAGS `{e['xla_flags']}`" if e["xla_flags"] else ""
    parts = ", ".join(f"{name} {took:.0f} s" for name, took in document["seconds"].items())
    return "\n".join(
        [
            (
                f"- {e['cpu']}, {e['threads']} threads, {e['device']}, clock {clock}, load average "
                f"{e['load_average']} at the start; {e['system']}."
            ),
            (
                f"- rooflax {e['rooflax']}, jax {e['jax']}, jaxlib {e['jaxlib']}, Python "
                f"{e['python']}{flags}."
            ),
            (
                f'- {e["date"]}, settings "{document["settings"]["name"]}"; took '
                f"{sum(document['seconds'].values()) / 60:.1f} min: {parts}."
            ),
            (
                "- Random weights, the same in every run. Loading is outside every clock. Each "
                "figure comes from a process of its own, one after the other, without a compile "
                "cache; "
                "warm is when a whole run compiles nothing, and a trial in which something "
                "compiled is taken again. Speeds are medians."
            ),
        ]
    )
