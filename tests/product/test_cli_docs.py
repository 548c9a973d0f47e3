"""docs/cli.md is what --help says."""

from pathlib import Path

import pytest

from rooflax.cli.docs import page
from rooflax.cli.main import VERBS, main

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_equals_help():
    wanted = page()
    assert DOCS.read_text(encoding="utf-8") == wanted, (
        "run: python -m rooflax.cli.docs > docs/cli.md"
    )


def test_the_page_holds_every_verbs_help(capsys):
    text = DOCS.read_text(encoding="utf-8")
    for argv in (["--help"], *([verb, "--help"] for verb in VERBS)):
        assert main(argv) == 0
        assert f"```\n{capsys.readouterr().out}```\n" in text
