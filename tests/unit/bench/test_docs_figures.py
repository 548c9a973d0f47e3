"""The pages about measuring: their tables are what their JSON says, and nothing is left out."""

import json
from importlib import resources

import pytest

from benchmarks import optimizations, rules
from tests.support.product.snippets import ROOT

SCHEMA = json.loads(resources.files("rooflax.bench").joinpath("bench.schema.json").read_text())


def text(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", [rules, optimizations])
def test_figures_replace_what_is_between_the_markers(script):
    page, document = (path.read_text(encoding="utf-8") for path in (script.PAGE, script.FIGURES))
    stale = page.replace(": begin -->\n", ": begin -->\nstale\n")
    assert "stale\n" in stale
    once = script.page_with_figures(stale, json.loads(document))
    assert "stale\n" not in once
    assert script.page_with_figures(once, json.loads(document)) == once


@pytest.mark.parametrize("script", [rules, optimizations])
def test_a_page_without_its_markers_is_rejected(script):
    document = json.loads(script.FIGURES.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="lacks"):
        script.page_with_figures("# A page\n", document)


def test_orders_of_equal_runs_by_hand():
    runs = [float(n) for n in range(10)]
    assert rules.alternating(runs) == ([0, 3, 4, 7, 8], [1, 2, 5, 6, 9])
    equal = [100.0] * (2 * rules.TRIALS * rules.COMPARISONS)
    found = rules.order(equal)
    assert all(o == {"claimed": 0, "verdicts": 0} for o in found.values())
    half = len(equal) // 2
    found = rules.order(equal[:half] + [120.0] * half)  # it became faster half way
    assert found["apart"]["claimed"] == rules.COMPARISONS
    assert found["interleaved"] == {"claimed": 0, "verdicts": 0}


def test_every_field_of_the_schema_is_explained():
    page = text("benchmarking.md")
    for name in ("document", "environment", "result", "setting", "summary", "step", "ceiling"):
        for field in SCHEMA["$defs"][name]["properties"]:
            assert f"`{field}`" in page, (name, field)
