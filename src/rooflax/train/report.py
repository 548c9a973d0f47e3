"""A run as one HTML page: its curves, its settings, its held-out losses. No script, no library."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflax.files import replacing
from rooflax.train.log import best_held_out

WIDTH, HEIGHT, LEFT, BELOW = 860, 240, 70, 24
"""Sizes of a plot in pixels, and what its labels take of them."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 0 auto; padding: 20px; }}
svg {{ display: block; width: 100%; height: auto; font-size: 12px; }}
td, th {{ padding: 2px 16px 2px 0; text-align: left; font-variant-numeric: tabular-nums; }}
td {{ white-space: pre-wrap; vertical-align: top; overflow-wrap: anywhere; }}
.training {{ stroke: #4878a8; color: #4878a8; }} .held-out {{ stroke: #c44e52; color: #c44e52; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<h2>Loss{unit}: <span class="training">training</span>,
<span class="held-out">held out</span></h2>
{loss}
<h2>Learning rate</h2>
{rate}
{further}
<h2>Held out</h2>
{held_out}
{samples}
<h2>Settings</h2>
{settings}
</body>
</html>
"""


def write_report(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the page of a log's lines; a file that was there is replaced whole.

    Raises:
        OSError: the disk is full, or the folder may not be written to.
    """
    with replacing(path, "utf-8") as file:
        file.write(report(lines, path.parent.name))


def report(lines: Sequence[dict[str, Any]], name: str) -> str:
    """The page of a log's lines."""
    steps = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out_loss" in line]
    settings = [line["settings"] for line in lines if "settings" in line]
    summary = f"{len(steps):,} steps"
    if steps:
        summary += f", {steps[-1]['tokens']:,} tokens, last loss {steps[-1]['loss']:.4f}"
    best = best_held_out(lines)
    if best is not None:
        summary += f"; best held-out loss {best['held_out_loss']:.4f} at step {best['step']:,}"
    ends = [line for line in held_out if line.get("whole")]  # of all rows, where others are of some
    if ends:
        summary += f", at the end {ends[-1]['held_out_loss']:.4f}"
    curves = {"training": _curve(steps, "loss"), "held-out": _curve(held_out, "held_out_loss")}
    known = {"step", "tokens", "loss", "lr", "grad_norm", "time"}
    names = [name for name in (steps[-1] if steps else ()) if name not in known]
    further = []
    for name in names:
        both = {"training": _curve(steps, name), "held-out": _curve(held_out, name)}
        further.append(f"<h2>{html.escape(name)}</h2>\n{_plot(both)}")
    rows = [
        (f"{line['step']:,}", f"{line['held_out_loss']:.4f}", "all rows" if line["whole"] else "")
        for line in held_out
    ]
    samples = [
        (f"{line['step']:,}", each["prompt"], each["text"])
        for line in lines
        for each in line.get("samples", ())
    ]
    answers = f"<h2>Samples</h2>\n{_table(('step', 'prompt', 'answer'), samples)}"
    return PAGE.format(
        title=html.escape(f"Training run {name}"),
        summary=summary,
        loss=_plot(curves),
        unit="" if names else ", nats per token",
        further="\n".join(further),
        rate=_plot({"training": _curve(steps, "lr")}),
        held_out=_table(("step", "loss", ""), rows),
        samples=answers if samples else "",
        settings=_table(("setting", "value"), [*settings[-1].items()] if settings else []),
    )


def _curve(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def _plot(curves: dict[str, list[tuple[int, float]]]) -> str:
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>nothing yet</p>"
    (first, last), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))

    def at(step: float, value: float) -> tuple[float, float]:
        right = (step - first) / ((last - first) or 1)
        up = (value - low) / ((high - low) or 1)
        return LEFT + right * (WIDTH - LEFT - 10), 10 + (1 - up) * (HEIGHT - BELOW - 10)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for share in (0, 0.5, 1):
        value, step = low + share * (high - low), first + share * (last - first)
        _, y = at(first, value)
        x, _ = at(step, low)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{step:,.0f}</text>')
    for name, curve in curves.items():
        placed = [at(*point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="{name}" fill="none" points="{line}"/>')
        if len(placed) < 60:
            parts += [
                f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in placed
            ]
    return "\n".join([*parts, "</svg>"])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [f"<tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>"]
    for row in rows:
        cells.append(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>")
    return "<table>\n" + "\n".join(cells) + "\n</table>"
