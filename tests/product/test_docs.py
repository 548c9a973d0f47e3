"""The documents do what they say: every Python block in them is run."""

from __future__ import annotations

import re
import shlex

import jax
import pytest

from rooflax.cli.main import parse
from tests.product.snippets import ROOT, Snippet, snippets

pytestmark = pytest.mark.oldest_jax


def run_all(path: str) -> int:
    """Runs a file's Python blocks one after the other in one namespace."""
    namespace: dict = {}
    count = 0
    for snippet in snippets(path, "python"):
        if snippet.code.startswith("# not run:"):
            continue
        run(path, snippet, namespace)
        count += 1
    return count


def run(path: str, snippet: Snippet, namespace: dict) -> None:
    code = compile(snippet.code, f"{path}:{snippet.line}", "exec")
    if snippet.raises is None:
        exec(code, namespace)
        return
    with pytest.raises(Exception) as caught:
        exec(code, namespace)
    names = [cls.__name__ for cls in type(caught.value).__mro__]
    assert snippet.raises in names, f"{path}:{snippet.line} raised {names[0]}"


def test_pitfalls_are_as_described() -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert run_all("docs/jax-pitfalls.md") == 13


def test_readme_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all("README.md") == 4
    out = capsys.readouterr().out
    assert "def add(a, b):" in out


def test_the_tutorials_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all("docs/tutorial.md") == 3
    assert "get_weather {'city': 'Oslo'}" in capsys.readouterr().out


def test_readme_shell_commands_exist() -> None:
    """Every verb and flag in the README's shell block is one that the command line knows."""
    (block,) = [s for s in snippets("README.md", "") if "rooflax generate" in s.code]
    lines = [line for line in block.code.splitlines() if line.startswith("rooflax ")]
    assert len(lines) >= 8
    for line in lines:
        assert parse(shlex.split(line, comments=True)[1:]) is not None


PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
NAMED = re.compile(
    r"^(rooflax-(?:chat|python)-5m|preset:[\w.-]+|[\w.-]+/[\w./-]+|\S+\.gguf|[A-Z]+|\[MODEL\]|<\w+>)$"
)


@pytest.mark.parametrize("page", PAGES)
def test_every_model_in_a_command_has_a_name_that_can_be_found(page: str) -> None:
    """A preset, a hub id with its owner, a folder, a GGUF file or a placeholder: "gpt2" is none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    verbs = "generate|chat|bench|inspect|train|quantize|verify|perplexity"
    for name in re.findall(rf"\brooflax (?:{verbs}) ([^-\s`|#)][^\s`|)]*)", text):
        assert NAMED.match(name), f"{page} names the model {name!r}"


def test_readme_tree_names_what_exists() -> None:
    (block,) = [s for s in snippets("README.md", "") if "\nsrc/rooflax/" in s.code]
    inside = [line.split()[0] for line in block.code.splitlines() if line.startswith("  ")]
    outside = [line.split()[0] for line in block.code.splitlines() if not line.startswith("  ")]
    for name in inside:
        assert (ROOT / "src" / "rooflax" / name).exists(), name
    for name in outside:
        assert (ROOT / name).exists(), name
