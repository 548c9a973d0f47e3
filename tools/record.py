"""Runs commands and draws what a terminal showed of them as an SVG of 80 columns.

    python tools/record.py docs/images/demo.svg

Lines appear one after the other and stay; without animation the picture is the last frame.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
from pathlib import Path

COLUMNS, CHAR, LINE, MARGIN = 80, 8.4, 19, 16
TYPE_S, LINE_S, PAUSE_S = 0.5, 0.12, 1.2
PROMPT = "def read_config(path):"
SHOWN = {
    ("generate", "-p", PROMPT, "-n", "40", "--temp", "0"): slice(None),
    ("chat", "--quiet", "-p", "Write a function that adds two numbers."): slice(None),
    ("chat", "--quiet", "-p", "Give me JSON with name Ada, age 36."): slice(None),
    ("inspect", "preset:llama-3.1-8b", "-q", "int4", "-c", "8192"): slice(-9, -2),
}
"""Each command, and which of its lines are drawn."""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" \
height="{height:g}">
<style>
text {{ font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace;
  white-space: pre; fill: #d6dbe4; animation: show 0s both; }}
text.command {{ fill: #8ec07c; }}
@keyframes show {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@media (prefers-reduced-motion) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#1d2330"/>
"""


def main() -> None:
    lines: list[tuple[str, bool]] = []
    for command, shown in SHOWN.items():
        lines.append((f"$ rooflax {' '.join(map(quoted, command))}", True))
        lines += [(line, False) for line in run(command)[shown]]
        lines.append(("", False))
    Path(sys.argv[1]).write_text(svg(lines[:-1]), encoding="utf-8")


def quoted(part: str) -> str:
    return f'"{part}"' if " " in part else part


def run(command: tuple[str, ...]) -> list[str]:
    """What the terminal shows: both streams as they come, without progress."""
    program = [str(Path(sys.executable).parent / "rooflax"), *command]
    settings = os.environ | {"COLUMNS": str(COLUMNS)}
    for _ in range(2):  # the second time everything is compiled
        done = subprocess.run(
            program,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=True,
            env=settings,
        )
    echo = PROMPT if PROMPT in command else ""
    lines = (echo + done.stdout).strip("\n").splitlines()
    return [line[:COLUMNS].rstrip() for line in lines]


def svg(lines: list[tuple[str, bool]]) -> str:
    width, height = COLUMNS * CHAR + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows, at = [], 0.3
    for number, (line, is_command) in enumerate(lines):
        at += PAUSE_S if is_command and number else LINE_S
        place = f'x="{MARGIN}" y="{MARGIN + (number + 0.75) * LINE:g}"'
        kind = ' class="command"' if is_command else ""
        text = html.escape(line).replace(" ", "&#160;")
        rows.append(f'<text {place}{kind} style="animation-delay:{at:.2f}s">{text}</text>\n')
        at += TYPE_S if is_command else 0
    return HEAD.format(width=width, height=height) + "".join(rows) + "</svg>\n"


if __name__ == "__main__":
    main()
