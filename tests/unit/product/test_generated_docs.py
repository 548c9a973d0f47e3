"""The pages that tools write are what they write today, and leave nothing out."""

import pytest

import rooflax
from rooflax.cli.main import VERBS, main
from rooflax.models.registry import families
from tests.support.product.snippets import ROOT
from tools import api_docs, cli_docs, family_docs, gpu_docs, server_docs

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("name", "tool"), [("api", api_docs), ("cli", cli_docs), ("server-fields", server_docs)]
)
def test_the_page_is_current(name, tool):
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == tool.page(), "run: make docs"


def test_every_public_name_is_on_the_page_of_the_api():
    assert sorted(n for names in api_docs.GROUPS.values() for n in names) == sorted(rooflax.__all__)


def test_the_page_of_the_command_line_holds_every_verbs_help(capsys):
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for argv in (["--help"], *([verb, "--help"] for verb in VERBS)):
        assert main(argv) == 0
        assert f"```\n{capsys.readouterr().out}```\n" in text


def test_the_table_of_families_is_current_and_has_every_family():
    text = family_docs.PAGE.read_text(encoding="utf-8")
    assert text == family_docs.page(text), "run: make docs"
    assert all(f"| `{name}` |" in text for name in families())


def test_a_row_says_what_a_definition_rejects_and_which_files_there_are():
    cells = family_docs.row("gpt_oss").split(" | ")
    assert cells[:2] == ["| `gpt_oss`", "GPT-OSS"]
    assert "gpt-oss-20b" in cells[2] and cells[3] == "`gpt-oss`"
    assert "other activations" in cells[4] and "2 tiny checkpoints" in cells[5]


def test_the_page_of_gpus_has_the_tables_that_are_committed():
    text = gpu_docs.PAGE.read_text(encoding="utf-8")
    assert text == gpu_docs.page(text), "run: make docs"
    row = next(line for line in text.splitlines() if line.startswith("| linear w8a16, rows 1 |"))
    assert gpu_docs.page(text.replace(row + "\n", "")) == text
