"""docs/models.md's table is what the registry, the definitions and the tests say."""

import importlib.util
from pathlib import Path

import pytest

from rooflax.models.registry import FAMILIES

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("family_docs", ROOT / "tools" / "family_docs.py")
family_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(family_docs)


def test_the_table_is_current_and_has_every_family():
    text = family_docs.PAGE.read_text(encoding="utf-8")
    assert text == family_docs.page(text), "run: python tools/family_docs.py"
    assert all(f"| `{name}` |" in text for name in FAMILIES)


def test_a_row_says_what_a_definition_rejects_and_which_files_there_are():
    cells = family_docs.row("gpt_oss").split(" | ")
    assert cells[:2] == ["| `gpt_oss`", "GPT-OSS"]
    assert "gpt-oss-20b" in cells[2] and cells[3] == "`gpt-oss`"
    assert "other activations" in cells[4] and "2 tiny checkpoints" in cells[5]
