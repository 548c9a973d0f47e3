"""Line coverage by area, from the JSON that coverage.py writes: `make coverage`.

    python tools/coverage_areas.py build/coverage.json [OTHER.json]

With a second file, of another state of the code, its shares stand beside. Processes that tests
start are not measured.
"""

import json
import sys
from collections import Counter
from pathlib import Path, PurePath

Counts = dict[str, Counter[str]]


def by_area(path: Path) -> Counts:
    """Statements and those that ran, of each folder of the package and of what is beside them."""
    found: Counts = {}
    for name, file in json.loads(path.read_text())["files"].items():
        inside = PurePath(name).parts[PurePath(name).parts.index("rooflax") + 1 :]
        area = found.setdefault(inside[0] if len(inside) > 1 else "(package)", Counter())
        for key in ("num_statements", "covered_lines"):
            area[key] += file["summary"][key]
    return {name: found[name] for name in sorted(found)} | {"all": sum(found.values(), Counter())}


def share(area: Counter[str]) -> str:
    return f"{100 * area['covered_lines'] / area['num_statements']:.1f}%" if area else "-"


def table(states: list[Counts]) -> list[str]:
    rows = []
    for name, area in states[0].items():
        lines = f"{area['covered_lines']:,} of {area['num_statements']:,}"
        shares = (share(state.get(name, Counter())) for state in states)
        rows.append(f"{name:<12}{lines:>18}" + "".join(f"{each:>9}" for each in shares))
    return rows


if __name__ == "__main__":
    states = [by_area(Path(name)) for name in sys.argv[1:]]
    sys.stdout.write("\n".join(table(states)) + "\n")
