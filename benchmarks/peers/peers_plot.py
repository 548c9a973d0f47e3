"""Plot of a comparison, one bar per row: rooflax's speed over the best peer's. Needs matplotlib."""

from __future__ import annotations

import io
from typing import Any

import plan
from plan import OURS

from rooflax.bench.plots import COLOURS, GREY, NO_METADATA, STYLE

WIDTH, MARGIN, BAR_HEIGHT = 6.4, 1.1, 0.17
COLUMNS = 2
ROOM = 2.1
"""Length of the axis over the largest ratio: a bar has its ratio and peer beside it."""


def plot(document: dict[str, Any]) -> str | None:
    """An SVG of the rows that have a peer, one panel per model; None where no row has one."""
    rows = [row for row in document["rows"] if row["ratio"] is not None]
    if not rows:
        return None
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"font.size": 7})
        return _svg(_drawn(rows))


def _drawn(rows: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max(sum(row["model"] == model for row in rows) for model in models)
    lines = -(-len(models) // COLUMNS)
    figure = Figure(figsize=(WIDTH, lines * (MARGIN + BAR_HEIGHT * most)), layout="constrained")
    grid = figure.subplots(lines, min(COLUMNS, len(models)), sharex=True, squeeze=False)
    panels = list(grid.flat)
    widths = list(dict.fromkeys(row["width"] for row in rows))
    for panel, model in zip(panels, models, strict=False):
        _panel(panel, model, [row for row in rows if row["model"] == model], widths)
        panel.set_xlim(0, ROOM * max(row["ratio"] for row in rows))
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    return figure


def _panel(axes: Any, model: str, rows: list[dict[str, Any]], widths: list[str]) -> None:
    ratios = [row["ratio"] for row in rows]
    colours = [COLOURS[widths.index(row["width"]) % len(COLOURS)] for row in rows]
    axes.barh(range(len(rows)), ratios, 0.7, color=colours)
    axes.axvline(1, color=GREY, linewidth=1)
    for index, row in enumerate(rows):
        text = f"{row['ratio']:.2f}x of {row['best_peer']}"
        axes.annotate(
            text, (row["ratio"], index), (3, 0), textcoords="offset points", va="center", color=GREY
        )
    axes.set_yticks(range(len(rows)), labels=[_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(title=plan.PUBLISHED.get(model, model), xlabel=f"speed of {OURS}, the best peer's = 1")


def _label(row: dict[str, Any]) -> str:
    width = "" if row["width"] == plan.FILE else f"{row['width']} "
    return f"{width}{row['test']} {row['batch']} x {row['prompt_tokens']}"


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=NO_METADATA, facecolor="white")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
