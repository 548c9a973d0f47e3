"""The curve of the KV cache as a PNG; needs matplotlib, which only this module imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_curve(curve: dict[str, Any], path: Path) -> bool:
    """Draws time to first token and later tokens per second, cache on and off, over the context.

    Returns:
        False if matplotlib is not installed; then nothing is written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    first, later = figure.subplots(1, 2)
    _draw(first, curve["points"], "ttft_s", 1e3)
    _draw(later, curve["points"], "decode_tok_per_s", 1.0)
    first.set_ylabel("time to first token, ms")
    later.set_ylabel("later tokens per second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return True


def _draw(axes: Any, points: list[dict[str, Any]], field: str, scale: float) -> None:
    contexts = [point["context"] for point in points]
    for side, colour in (("off", "tab:red"), ("on", "tab:blue")):
        values = [point[side][field]["median"] * scale for point in points]
        axes.plot(contexts, values, marker="o", color=colour, label=f"cache {side}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_xlabel("tokens of context")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
