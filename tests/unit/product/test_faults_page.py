"""docs/faults.md names tests that exist, and leaves no row out."""

import re

from tests.support.product.snippets import ROOT

PAGE = (ROOT / "docs/faults.md").read_text()
ROWS = {"F": 15, "T": 9, "C": 16, "L": 6}


def test_every_test_that_is_named_exists():
    defined = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 80 and not named - defined


def test_every_row_is_held_by_a_test():
    rows = re.findall(r"^\| (\w*) \| .* \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    rows = [row for row in rows if row != ("", "held by")]
    assert [name for name, _ in rows if name] == [
        f"{letter}{number}" for letter, count in ROWS.items() for number in range(1, count + 1)
    ]
    assert all("`test_" in tests for _, tests in rows)
