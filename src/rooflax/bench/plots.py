"""Plots of a document of `rooflax bench --json`, as SVG; needs matplotlib, which only this imports.

A plot that would show a single value is left out. Colours are Okabe and Ito's, which colour-blind
people tell apart.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rooflax.bench.report import labels

Result = dict[str, Any]
MARKERS = {"decode": "o", "prefill": "^"}
STEP_SECONDS = {"decode": "tpot_s", "prefill": "ttft_s"}
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C",
)  # fmt: skip
GREY, FAINT = "#666666", "#DDDDDD"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rooflax",  # else ids differ from run to run
    "text.parse_math": False,  # a $ is a $
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
WIDTH, HEIGHT, BAR_HEIGHT, LINE_HEIGHT = 5.2, 2.9, 0.3, 0.15
LABEL_COLUMNS = 30
LOG_FROM = 30.0
"""Largest over smallest value from which an axis is logarithmic."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Plot(NamedTuple):
    """One picture: the prefix of its ids, what it shows, an <svg> element."""

    name: str
    caption: str
    svg: str


def plots(document: dict[str, Any]) -> list[Plot]:
    """The plots that this document has something to show for."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # matplotlib reads a matplotlibrc in the current folder first
        matplotlib.rcParams.update(STYLE)
        return [
            Plot(name, caption, _svg(figure, name))
            for name, caption, figure in _drawn(document)
            if figure is not None
        ]


def _drawn(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, caption, figure or None) of every plot there is."""
    results, names = document["results"], row_labels(document)
    if "ablation" in document:
        caption = "Decode speed per setting, with the ratio of the step and in all."
        yield "ablation", caption, _ablation(document["ablation"])
    for field, word in (("batch", "batch size"), ("prompt_tokens", "prompt length")):
        for phase in MARKERS:
            caption = f"{phase.capitalize()} speed by {word}: median and range of the trials."
            yield f"{phase}-{field}", caption, _speed(results, phase, field, word)
    for phase in MARKERS:
        caption = f"{phase.capitalize()} speed of every trial; the bar is the median."
        yield f"{phase}-trials", caption, _trials(results, names, phase)
    caption = "Roofline: the median trials under the median ceilings."
    yield "roofline", caption, _roofline(document, names)
    peak = "the device's peak" if _on_device(results) else "peak RSS"
    caption = f"Memory by part; the rest goes up to {peak}."
    yield "memory", caption, _memory(results, names)


def row_labels(document: dict[str, Any]) -> list[str]:
    """The settings of an ablation, or what tells the rows apart."""
    if "ablation" in document:
        return [row["label"] for row in document["ablation"]]
    return labels(document["results"])


def _svg(figure: Any, name: str) -> str:
    """An element whose ids begin with `name`: one page holds several."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    text = buffer.getvalue()
    return re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])


def _figure(height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _bars(names: Sequence[str]) -> tuple[Any, Any]:
    """A figure as high as its rows, the first one on top."""
    wrapped = [textwrap.fill(name, LABEL_COLUMNS) for name in names]
    lines = sum(name.count("\n") for name in wrapped)
    figure, axes = _figure(1.0 + BAR_HEIGHT * len(names) + LINE_HEIGHT * lines)
    axes.set_yticks(range(len(names)), labels=wrapped)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes; the figure grows by what it takes."""
    handles, names = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, names)) > LABEL_COLUMNS else 2
    lines = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * lines)
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def _scale(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Scale of an axis: from 0, or logarithmic from below the smallest value if values are far
    apart."""
    name, low, high = axis.axis_name, min(values), max(values)
    if low > 0 and high / low > LOG_FROM:
        axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low / 2, high * 1.5)})
    else:
        axis.axes.set(**{f"{name}lim": (0, high * 1.08)})
    axis.set_major_formatter(lambda value, _: text(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _si(value: float) -> str:
    """1,500,000 is "1.5 M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def _speed(results: Sequence[Result], phase: str, field: str, word: str) -> Any:
    series: dict[str, list[Result]] = {}
    for name, row in zip(labels(results, without=field), results, strict=True):
        series.setdefault(name, []).append(row)
    series = {n: rows for n, rows in series.items() if len({r[field] for r in rows}) > 1}
    if not series:
        return None
    figure, axes = _figure()
    for index, (name, rows) in enumerate(series.items()):
        rows = sorted(rows, key=lambda row: row[field])
        speeds = [row[f"{phase}_tok_per_s"] for row in rows]
        middle = [s["median"] for s in speeds]
        below = [s["median"] - s["min"] for s in speeds]
        above = [s["max"] - s["median"] for s in speeds]
        cycle, colour = divmod(index, len(COLOURS))
        line = {"marker": "osD^"[cycle % 4], "color": COLOURS[colour], "markersize": 4}
        x = [row[field] for row in rows]
        axes.errorbar(x, middle, (below, above), label=name, capsize=2, **line)
    used = [row for rows in series.values() for row in rows]
    ticks = sorted({row[field] for row in used})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    ends = [row[f"{phase}_tok_per_s"][end] for row in used for end in ("min", "max")]
    _scale(axes.yaxis, ends, _number)
    axes.set(xlabel=f"{word}{', tokens' if 'tokens' in field else ''}", ylabel="tokens per second")
    if len(series) > 1:
        _legend(figure, axes)
    return figure


def _trials(results: Sequence[Result], names: Sequence[str], phase: str) -> Any:
    speeds = [row[f"{phase}_tok_per_s"] for row in results]
    if all(len(speed["trials"]) == 1 for speed in speeds):
        return None
    figure, axes = _bars(names)
    for index, speed in enumerate(speeds):
        trials = speed["trials"]
        axes.plot(trials, [index] * len(trials), "o", color=COLOURS[0], alpha=0.45, markersize=5)
        axes.plot(speed["median"], index, "|", color=COLOURS[1], markersize=13, markeredgewidth=2)
    _scale(axes.xaxis, [t for speed in speeds for t in speed["trials"]], _number)
    axes.set_xlabel("tokens per second")
    return figure


def _roofline(document: dict[str, Any], names: Sequence[str]) -> Any:
    results, roofline = document["results"], document["roofline"]
    read, multiply = roofline["read_gb_per_s"] * 1e9, roofline["flops_per_s"]
    points = {phase: [_point(row, phase) for row in results] for phase in MARKERS}
    every = [point for of_series in points.values() for point in of_series]
    low = min(x for x, _ in every) / 3
    high = 4 * max(multiply / read, *(x for x, _ in every))
    figure, axes = _figure(HEIGHT + 0.4)
    axes.plot([low, high], [low * read, high * read], color=GREY, label=f"reads {_si(read)}B/s")
    text = f"multiplies {_si(multiply)} operations/s"
    axes.axhline(multiply, color=GREY, linestyle="--", label=text)
    by_row = 1 < len(results) <= len(COLOURS)
    for index, (phase, marker) in enumerate(MARKERS.items()):
        for row, (x, y) in enumerate(points[phase]):
            colour = COLOURS[row if by_row else index]
            axes.plot(x, y, marker, color=colour, markersize=6.5, alpha=0.85, markeredgewidth=0)
        colour = GREY if by_row else COLOURS[index]
        axes.plot([], [], marker, color=colour, label=phase)
    if by_row:
        for name, colour in zip(names, COLOURS, strict=False):
            axes.plot([], [], "s", color=colour, label=name)
    bottom = min(low * read, *(y for _, y in every)) / 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, multiply * 4))
    axes.set(xlabel="operations per byte read", ylabel="operations per second")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _si(value))
    _legend(figure, axes)
    return figure


def _point(row: Result, phase: str) -> tuple[float, float]:
    """(operations per byte, operations per second of the median trial)."""
    step, seconds = row[f"{phase}_step"], row[STEP_SECONDS[phase]]["median"]
    return step["operations"] / step["total_bytes"], step["operations"] / seconds


def _on_device(results: Sequence[Result]) -> bool:
    return any(row["peak_device_bytes"] is not None for row in results)


def _memory(results: Sequence[Result], names: Sequence[str]) -> Any:
    figure, axes = _bars(names)
    peak = "peak_device_bytes" if _on_device(results) else "peak_rss_bytes"
    parts = {
        "weights": [row["weights_bytes"] for row in results],
        "KV cache": [row["kv_cache_bytes"] for row in results],
        "temporaries": [row["memory"]["temporary_bytes"] for row in results],
    }
    left = [sum(row) for row in zip(*parts.values(), strict=True)]
    parts["rest"] = [
        max(0, (row[peak] or 0) - known) for row, known in zip(results, left, strict=True)
    ]
    largest = max(map(sum, zip(*parts.values(), strict=True)))
    unit, name = (1 << 30, "GiB") if largest >= 1 << 30 else (1 << 20, "MiB")
    ends = [0.0] * len(results)
    for (part, sizes), colour in zip(parts.items(), (*COLOURS[:3], "#C8C8C8"), strict=True):
        widths = [size / unit for size in sizes]
        axes.barh(range(len(widths)), widths, 0.65, left=ends, color=colour, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_xlabel(name)
    _legend(figure, axes)
    return figure


def _ablation(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = _bars([row["label"] for row in rows])
    speeds = [row["decode_tok_per_s"] for row in rows]
    colours = [COLOURS[row["label"].startswith("all but")] for row in rows]
    axes.barh(range(len(rows)), speeds, 0.65, color=colours)
    for index, row in enumerate(rows):
        ratio, total = _number(row["ratio"]), _number(row["total_ratio"])
        text = f"{ratio}x ({total}x in all)" if index else "1x"
        axes.annotate(text, (speeds[index], index), (4, 0), textcoords="offset points", va="center")
    _scale(axes.xaxis, speeds, _number)
    left, right = axes.get_xlim()  # room for the ratios
    grow = (right / left) ** 0.5 if left > 0 else 1.45
    axes.set(xlim=(left, right * grow), xlabel="decode, tokens per second")
    return figure
