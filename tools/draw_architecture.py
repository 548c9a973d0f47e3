"""Draws docs/images/architecture.svg: the layers of the package, and the path of a token.

    python tools/draw_architecture.py > docs/images/architecture.svg

The layers are those of import-linter's contract in pyproject.toml, top to bottom.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
WIDTH, ROW, TOP, LEFT, GAP = 940, 46, 86, 24, 8
LAYERS_WIDTH = 400
TIP = (
    "<defs><marker id='tip' markerWidth='9' markerHeight='9' refX='7' refY='4' orient='auto'>"
    "<path d='M0,0 L8,4 L0,8 z' fill='#64748b'/></marker></defs>"
)
FONT = "font-family='Helvetica, Arial, sans-serif'"

ABOUT = {
    "cli": "one file per verb",
    "server": "OpenAI-compatible HTTP",
    "bench": "speeds as shares of the roofline",
    "async_llm": "text, many callers at once",
    "rl": "GRPO: rollouts, rewards",
    "llm": "text in, text out",
    "train": "data, step, checkpoints",
    "engine": "token ids in, token ids out",
    "loading": "safetensors, GGUF, tokenizer",
    "models": "one definition per family",
    "nn": "parts, decoder, KV cache, mesh",
    "ops": "linear, attention, moe, sampling",
    "errors": "exceptions",
}
"""Of the layers that are drawn; small helpers between them are left out."""

WAY = (
    ("prompt", "generate, chat, a request", "cli"),
    ("token ids", "tokenizer, chat template", "loading"),
    ("sequence", "checked, waits in the queue", "llm"),
    ("schedule", "decode rows and prompt chunks: one list", "engine"),
    ("pack", "tokens, lengths, block tables: one array", "engine"),
    ("forward", "embedding, layers, KV cache written and read", "nn"),
    ("kernels", "linear, attention, experts", "ops"),
    ("sample", "logits to the next id, on the device", "ops"),
    ("append", "stop? free blocks; else the next step", "engine"),
    ("text", "ids to whole characters", "llm"),
)
"""What happens, in what form, and in which layer."""


def layers() -> list[list[str]]:
    """The drawn layers, those of one rank together; the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    ranks = next(c for c in contracts["contracts"] if c["type"] == "layers")["layers"]
    found = []
    for rank in ranks:
        names = [name.strip().removeprefix("rooflax.") for name in rank.split(":")]
        if drawn := [name for name in names if name in ABOUT]:
            found.append(drawn)
    return found


def box(x: float, y: float, width: float, title: str, about: str, fill: str) -> str:
    """A rectangle with a title and, below it, a line about it."""
    middle = x + width / 2
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{ROW}' rx='6' fill='{fill}' "
        f"stroke='#334155'/>"
        f"<text x='{middle}' y='{y + 19}' text-anchor='middle' font-size='14' "
        f"font-weight='bold' fill='#0f172a'>{escape(title)}</text>"
        f"<text x='{middle}' y='{y + 36}' text-anchor='middle' font-size='11' "
        f"fill='#334155'>{escape(about)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return (
        f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#64748b' stroke-width='1.5' "
        f"marker-end='url(#tip)' {more}/>"
    )


COLOURS = (
    "#dbeafe", "#f3e8ff", "#cffafe", "#dcfce7", "#fef9c3", "#f5f5f4", "#ffedd5", "#fecdd3",
    "#fce7f3", "#ede9fe", "#e2e8f0", "#f8fafc", "#ecfccb",
)  # fmt: skip


def drawing() -> str:
    """The picture as SVG."""
    ranks = layers()
    names = [name for rank in ranks for name in rank]
    colour = dict(zip(names, COLOURS, strict=False))
    step = ROW + 14
    height = TOP + step * max(len(ranks), len(WAY)) + 18
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT}>",
        TIP,
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        heading(LEFT, "Layers", "a layer imports from those below"),
    ]
    for i, rank in enumerate(ranks):
        y, width = TOP + i * step, (LAYERS_WIDTH - GAP * (len(rank) - 1)) / len(rank)
        for j, name in enumerate(rank):
            x = LEFT + j * (width + GAP)
            parts.append(box(x, y, width, name, ABOUT[name], colour[name]))
        if i:
            parts.append(arrow(LEFT + LAYERS_WIDTH / 2, y - 14, LEFT + LAYERS_WIDTH / 2, y - 2))
    x, width = LEFT + LAYERS_WIDTH + 90, 370
    parts.append(heading(x, "The path of a token", "colours are those of the layers"))
    for i, (title, about, layer) in enumerate(WAY):
        y = TOP + i * step
        parts.append(box(x, y, width, title, about, colour[layer]))
        if i:
            parts.append(arrow(x + width / 2, y - 14, x + width / 2, y - 2))
    first, last = (TOP + row_of(name) * step + ROW / 2 for name in ("schedule", "append"))
    side = x + width + 26
    parts.append(
        f"<path d='M{x + width},{last} H{side} V{first} H{x + width + 4}' fill='none' "
        f"stroke='#64748b' stroke-width='1.5' marker-end='url(#tip)'/>"
        f"<text x='{side + 14}' y='{(first + last) / 2}' font-size='11' fill='#334155' "
        f"text-anchor='middle' transform='rotate(90 {side + 14} {(first + last) / 2})'>"
        "the next step</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def heading(x: float, title: str, about: str) -> str:
    return (
        f"<text x='{x}' y='38' font-size='20' font-weight='bold' fill='#0f172a'>{title}</text>"
        f"<text x='{x}' y='60' font-size='12' fill='#334155'>{about}</text>"
    )


def row_of(title: str) -> int:
    return next(i for i, (name, *_) in enumerate(WAY) if name == title)


if __name__ == "__main__":
    sys.stdout.write(drawing())
