"""The curves of a run as a PNG; needs matplotlib, which only this module imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_curves(lines: list[dict[str, Any]], path: Path) -> bool:
    """Draws training and held-out loss, and the learning rate, over tokens.

    Args:
        lines: a log's lines, as `log.read_log` gives them.

    Returns:
        False if matplotlib is not installed; then nothing is written.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # matplotlib reads a matplotlibrc in the current folder first
        _plot(lines, path)
    return True


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "held_out_loss" in line]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw(loss, steps, "loss", label="training", linewidth=0.8)
    _draw(loss, held_out, "held_out_loss", label="held out", marker="o", markersize=3)
    _draw(rate, steps, "lr", linewidth=0.8)
    loss.set_ylabel("loss, nats per token")
    rate.set_ylabel("learning rate")
    rate.set_xlabel("tokens")
    loss.legend()
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def _draw(axes: Any, lines: list[dict[str, Any]], field: str, **style: Any) -> None:
    axes.plot([line["tokens"] for line in lines], [line[field] for line in lines], **style)
