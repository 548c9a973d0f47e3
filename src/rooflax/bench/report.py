"""Results as text: tables for the terminal, Markdown, and the full report block."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rooflax.nn.execution import ExecutionOptions, gib

Result = dict[str, Any]
HEADER = (
    "model", "size", "params", "format", "batch", "options", "test", "tok/s", "roofline",
    "bound by",
)  # fmt: skip
ALWAYS = ("batch", "test", "tok/s", "roofline", "bound by")
ABLATION = ("setting", "tok/s", "step", "in all", "temporary", "peak RSS", "tokens")
BAR = 20


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Two rows per result, prefill and decode, in the manner of llama-bench."""
    out = []
    for result in results:
        head = (
            result["model"],
            gib(result["weights_bytes"]),
            f"{result['parameters'] / 1e6:.1f} M",
            result["format"],
            str(result["batch"]),
            options_of(result),
        )
        for test, tokens in (("prefill", "prompt_tokens"), ("decode", "output_tokens")):
            speed = result[f"{test}_tok_per_s"]
            shown = f"{speed['mean']:.1f} ± {speed['std']:.1f}"
            share = f"{result[f'{test}_roofline']:.1%}"
            bound = result[f"{test}_bound"]
            out.append((*head, f"{test} {result[tokens]}", shown, share, bound))
    return out


def share_of(result: Result, test: str) -> str:
    """Percentage of the roofline, with the ceiling that limits the step."""
    return f"{result[f'{test}_roofline']:.1%} ({result[f'{test}_bound']})"


def both_shares_of(result: Result, test: str) -> str:
    """Percentages of the memory's ceiling and of the compute ceiling."""
    return f"MBU {result[f'{test}_mbu']:.1%}, MFU {result[f'{test}_mfu']:.1%}"


def ceilings_of(document: dict[str, Any]) -> str:
    """Median readings: the document's, and where formats differ, of multiplying each one's."""
    roofline = document["roofline"]
    readings: dict[str, list[float]] = {}
    for result in document["results"]:
        both = (trial[when] for trial in result["ceilings"] for when in ("before", "after"))
        readings.setdefault(result["format"], []).extend(one["flops_per_s"] for one in both)
    rates = [f"{roofline['flops_per_s'] / 1e9:.0f} GFLOP/s"]
    if len(readings) > 1:
        rates = [f"{median(values) / 1e9:.0f} GFLOP/s {name}" for name, values in readings.items()]
    read = f"read {roofline['read_gb_per_s']:.1f} GB/s"
    source = f"{roofline['source']}, {gib(roofline['buffer_bytes'])}"
    return f"{read}, multiply {', '.join(rates)} ({source})"


def options_of(result: Result) -> str:
    """The switches that are not the default, and the mesh if there is one."""
    options, mesh = ExecutionOptions(**result["options"]).describe(), result.get("mesh")
    return f"{options}, mesh {mesh}" if mesh else options


def labels(results: Sequence[Result], without: str = "") -> list[str]:
    """Per row, the values of the fields that vary; of the shape of work if none does.

    Args:
        without: a field to leave out.
    """
    columns = {
        "batch": [f"batch {r['batch']}" for r in results],
        "prompt_tokens": [f"prompt {r['prompt_tokens']}" for r in results],
        "output_tokens": [f"output {r['output_tokens']}" for r in results],
        "format": [r["format"] for r in results],
        "kv_dtype": [f"KV {r['precision']['kv_dtype']}" for r in results],
        "options": [options_of(r) for r in results],
    }
    columns.pop(without, None)
    varied = [column for column in columns.values() if len(set(column)) > 1]
    return [", ".join(row) for row in zip(*(varied or list(columns.values())[:2]), strict=True)]


def table(results: Sequence[Result]) -> str:
    """Table for the terminal; settings that all rows share stand once above it."""
    lines = rows(results)
    shared = [
        i for i, name in enumerate(HEADER)
        if name not in ALWAYS and len({line[i] for line in lines}) == 1
    ]  # fmt: skip
    head = "  ".join(lines[0][i] for i in shared)
    cells = [
        tuple(cell for i, cell in enumerate(line) if i not in shared) for line in (HEADER, *lines)
    ]
    return "\n".join([*([head, ""] if head else []), *_aligned(cells)])


def _aligned(cells: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    text = []
    for index, row in enumerate(cells):
        text.append(
            "  ".join(
                cell.ljust(width) if i in left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
        if index == 0:
            text.append("  ".join("-" * width for width in widths))
    return text


def markdown(results: Sequence[Result]) -> str:
    """A Markdown table of the same rows."""
    return _markdown([HEADER, *rows(results)])


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def notes(document: dict[str, Any]) -> list[str]:
    """The ceilings, and what is doubtful."""
    lines = [f"ceiling: {ceilings_of(document)}"]
    results = document["results"]
    for name, result in zip(labels(results), results, strict=True):
        note = f"note: {name}: " if len(results) > 1 else "note: "
        texts = (*result["warnings"], *result.get("passed_over", ()))
        lines += [f"{note}{sentence}" for sentence in texts]
        cost = result.get("deterministic_over_plain")
        if cost:
            lines.append(
                f"{note}deterministic decode is {cost['ratio']:.3f}x the plain one's speed"
            )
    return lines


def ablation_cells(ablation: Sequence[Result]) -> list[tuple[str, ...]]:
    """The rows of an ablation, header first."""
    return [
        ABLATION,
        *(
            (
                row["label"],
                f"{row['decode_tok_per_s']:.1f}",
                f"{row['ratio']:.2f}x",
                f"{row['total_ratio']:.1f}x",
                gib(row["temporary_bytes"]),
                gib(row["peak_rss_bytes"] or 0),
                "same" if row["same_tokens"] else "DIFFERENT" if row["exact"] else "others",
            )
            for row in ablation
        ),
    ]


def ablation_table(ablation: Sequence[Result]) -> str:
    """The rows, and a bar per row."""
    best = max(row["decode_tok_per_s"] for row in ablation)
    names = max(len(row["label"]) for row in ablation)
    bars = [
        f"{row['label']:<{names}}  {'█' * max(1, round(BAR * row['decode_tok_per_s'] / best))}"
        for row in ablation
    ]
    return "\n".join([*_aligned(ablation_cells(ablation), left=(0,)), "", *bars])


def ablation_markdown(ablation: Sequence[Result]) -> str:
    return _markdown(ablation_cells(ablation))


def breakdown_table(result: dict[str, Any]) -> str:
    """Shares of the time of a decode step and of a prefill."""
    cells = [("part", *(f"{phase} share" for phase in result["phases"]))]
    parts = list(next(iter(result["phases"].values()))["shares"])
    for part in parts:
        shares = [phase["shares"][part] for phase in result["phases"].values()]
        cells.append((part, *(f"{share:.1%}" for share in shares)))
    return "\n".join(_aligned(cells, left=(0,)))


def full_report(document: dict[str, Any]) -> str:
    """Hardware, versions, settings, mean ± deviation, range, shares, memory, warnings."""
    parts = [
        "environment",
        *(f"  {key:<22} {value}" for key, value in document["environment"].items()),
        "",
        f"roofline  {ceilings_of(document)}",
    ]
    for result in document["results"]:
        parts += ["", *_result_block(result, _uncached(result, document["results"]))]
    return "\n".join(parts)


def _uncached(result: Result, results: Sequence[Result]) -> Result | None:
    """The row of the same work without a cache, if it was measured."""
    same = ("model", "format", "batch", "prompt_tokens", "output_tokens")
    for other in results:
        if not other["options"]["use_cache"] and all(other[n] == result[n] for n in same):
            return other
    return None


def _result_block(result: Result, uncached: Result | None) -> list[str]:
    size, work = f"{result['parameters'] / 1e6:.1f} M parameters", f"batch {result['batch']}"
    lengths = f"{result['prompt_tokens']} + {result['output_tokens']} tokens"
    lines = [
        f"{result['model']} ({size}), {result['format']}, {work}, {lengths}",
        f"  settings           {options_of(result)}; KV cache {result['precision']['kv_dtype']}",
    ]
    for name in ("prefill_tok_per_s", "decode_tok_per_s", "ttft_s", "tpot_s"):
        s = result[name]
        lines.append(
            f"  {name:<18} {s['mean']:.4g} ± {s['std']:.2g}, range {s['min']:.4g} to "
            f"{s['max']:.4g}, median {s['median']:.4g}, {len(s['trials'])} trials"
        )
    memory = result["memory"]
    lines += [
        (
            f"  of the roofline    prefill {share_of(result, 'prefill')}, "
            f"decode {share_of(result, 'decode')}"
        ),
        f"  prefill            {both_shares_of(result, 'prefill')}",
        f"  decode             {both_shares_of(result, 'decode')}",
        (
            f"  load, compile      {result['load_s']:.2f} s, {result['compile_s']:.2f} s; "
            f"{result['warm_ups']} warm-up runs, {result['void_trials']} void trials"
        ),
        (
            f"  memory             weights {gib(result['weights_bytes'])}, KV cache "
            f"{gib(result['kv_cache_bytes'])}, temporaries {gib(memory['temporary_bytes'])}, "
            f"peak RSS {gib(result['peak_rss_bytes'] or 0)}"
        ),
    ]
    if not result["options"]["use_cache"]:
        lines.append("  without a cache    this row")
    elif uncached is not None:
        ratio = result["decode_tok_per_s"]["mean"] / uncached["decode_tok_per_s"]["mean"]
        lines.append(f"  without a cache    {ratio:.2f}x faster than that")
    else:
        lines.append("  without a cache    not measured (--ablate does)")
    return lines + [f"  note               {warning}" for warning in result["warnings"]]
