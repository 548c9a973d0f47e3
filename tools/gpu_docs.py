"""docs/gpu.md's tables, from those that `gpu_compile.py` keeps in tools/gpu_tables.

python tools/gpu_docs.py    writes them into the page
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLES = ROOT / "docs" / "gpu.md", ROOT / "tools" / "gpu_tables"
Row = dict[str, Any]
Table = dict[str, dict[str, Row]]
"""Kernels and steps by their names."""

KERNEL_COLUMNS = {
    "registers": "registers", "spilled": "spilled", "launches": "launches",
    "instructions a weight": "per_weight", "lowering, s": "lowering_s",
}  # fmt: skip
STEP_COLUMNS = {
    "launches a layer": "launches", "besides": "besides", "at most": "asked", "spilled": "spilled",
    "temporary, MB": "temporary_mb", "lowering, s": "lowering_s", "compiling, s": "compiling_s",
}  # fmt: skip


def kernels_and_steps(table: Table) -> list[str]:
    """A table of each."""
    parts = (("kernel", "kernels", KERNEL_COLUMNS), ("step", "steps", STEP_COLUMNS))
    found = []
    for what, part, columns in parts:
        lines = [f"| {what} | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
        for name, row in table[part].items():
            numbers = [_known(row).get(key) for key in columns.values()]
            cells = ["" if number is None else f"{number:g}" for number in numbers]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        found.append("".join(f"{line}\n" for line in lines))
    return found


def _known(row: Row) -> Row:
    """Without what no kernel was assembled for: XLA had it, or the same kernel was there."""
    return row if row.get("kernels", 1) else {k: row[k] for k in ("launches", "lowering_s")}


def committed(name: str) -> Table:
    kept = TABLES / f"{name}.json"
    return json.loads(kept.read_text()) if kept.exists() else {"kernels": {}, "steps": {}}


def newest() -> Table:
    """Of the newest JAX that was compiled with."""
    return committed(max(TABLES.glob("jax-*.json")).stem)


def page(text: str) -> str:
    """docs/gpu.md with the tables as they are now."""
    sys.path.insert(0, str(ROOT / "tools"))
    import gpu_estimate
    import gpu_speed

    table, law = newest(), gpu_speed.LAW
    tables = kernels_and_steps(table) + gpu_estimate.tables(table)
    fitted, predicted = gpu_speed.measured(), gpu_speed.predicted(law)
    for lines in (gpu_speed.table(fitted, law), gpu_speed.predictions(predicted)):
        tables.append("".join(f"{line}\n" for line in lines))
    for each in tables:
        head = each.split(" |", 2)[:2]
        begin = re.escape(" |".join(head))
        text, count = re.subn(rf"^{begin} \|.*\n(?:\|.*\n)*", lambda _, e=each: e, text, flags=re.M)
        assert count == 1, f"docs/gpu.md has {count} tables that begin with {head}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
