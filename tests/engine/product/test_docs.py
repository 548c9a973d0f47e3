"""The documents do what they say: what they show is run, or says that it is not."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import pytest

from rooflax.cli.main import VERBS, parse
from rooflax.errors import RequestError
from tests import encoder_cases, gguf_cases, goldens
from tests.pooling_cases import NORMALIZE, pooling, write_modules
from tests.support.product.snippets import BLOCK, ROOT, Snippet, commands, snippets

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


def test_usage_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all("docs/usage.md") == 4
    out = capsys.readouterr().out
    assert '{"name": "Ada", "age": 36}' in out
    assert "try:\n    import linecache\n" in out


def test_snippets_of_embedding_run(workplace: Path) -> None:
    assert run_all("docs/embedding.md") == 6


def test_the_tutorials_snippets_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_all("docs/tutorial.md") == 5
    assert "get_weather {'city': 'Oslo'}" in capsys.readouterr().out


PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
GENERATED = ("docs/api.md", "docs/cli.md")
WRITTEN = [page for page in PAGES if page not in GENERATED]
LONG = ("bench", "train", "verify")
"""Verbs that take long: the default run only parses their commands."""
NAMED = re.compile(
    r"^(rooflax-(?:chat|python)-5m|(?:preset|package):[\w.-]+|[\w.-]+/[\w./-]+|\S+\.gguf|[A-Z]+|\[MODEL\]|<\w+>)$"
)


@pytest.mark.parametrize("page", WRITTEN)
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert {match.group(1) for match in BLOCK.finditer(text)} <= {"python", "sh", "text"}
    for command in commands(page):
        assert command.is_ours or not command.is_run, f"{page}: {command.words} is not run"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages' commands name."""
    prompts = ('{"prompt": "import "}', '{"prompt": "class "}')
    questions = [json.dumps({"messages": [{"role": "user", "content": "What does len do?"}]})]
    texts = [json.dumps({"text": "def add(a, b):\n    return a + b\n" * 40})] * 40
    choices = ['{"question": "1 + 1?", "choices": ["2", "3"], "answer": 0}']
    greetings = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "Greet Ada."},
                    {"role": "assistant", "content": "Good morning, Ada!"},
                ]
            }
        )
    ] * 40
    files = {
        "prompts": prompts,
        "questions": questions,
        "choices": choices,
        "texts": texts,
        "greetings": greetings,
    }
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "lines.txt").write_text("A man is eating pasta.\nThe sky is blue.\n")
    (tmp_path / "notes.txt").write_text("A note about the roofline. " * 20)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("def add(a, b):\n    return a + b\n" * 200)
    shutil.copy(gguf_cases.gguf("llama3", "q8_0"), tmp_path / "model.gguf")
    goldens.write_checkpoint(tmp_path / "model", "llama_gqa", goldens.committed("llama_gqa"))
    encoder_cases.write(tmp_path / "reranker", "bert", scores=True)
    encoder = encoder_cases.write(tmp_path / "all-MiniLM-L6-v2", "bert")
    write_modules(encoder, pooling("mean_tokens", 60), NORMALIZE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_commands(page: str, rooflax: Any, folder: Path, *, skip: Collection[str] = ()) -> int:
    """Runs a page's commands one after the other, but those of the verbs to skip.

    A command that needs the folder of one that was skipped is skipped too.
    """
    count = 0
    missing: tuple[str, ...] = ()
    for command in commands(page):
        if not command.is_ours:
            continue
        assert parse(command.words[1:]) is not None
        if command.is_run and command.words[1] in skip:
            missing += output_folders(command.words)
        elif command.is_run and not any(word.startswith(missing) for word in command.words):
            ran = rooflax(*command.words[1:])
            assert ran.code == 0, f"{page}: {' '.join(command.words)}: {ran.err}"
            if command.output:
                (folder / command.output).write_text(ran.out)
            count += 1
    return count


def output_folders(words: Sequence[str]) -> tuple[str, ...]:
    """The folders that a command's `--out` names."""
    return tuple(value for flag, value in pairwise(words) if flag == "--out")


WITH_COMMANDS = [page for page in WRITTEN if any(c.is_ours for c in commands(page))]
WITH_LONG = [
    page for page in WITH_COMMANDS if any(c.is_run and c.words[1] in LONG for c in commands(page))
]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_shell_commands_run(page: str, rooflax: Any, workplace: Path) -> None:
    count = run_commands(page, rooflax, workplace, skip=LONG)
    # those of sharding need more devices, and a server runs until it is stopped
    assert count > 0 or page in (*WITH_LONG, "docs/sharding.md", "docs/server.md")


INLINE = re.compile(r"`(rooflax\s[a-z][^`]*)`")


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_in_sentences_are_known(page: str) -> None:
    """Verbs and flags are what the command line takes."""
    for command in INLINE.findall((ROOT / page).read_text(encoding="utf-8")):
        words = shlex.split(" ".join(command.split()).partition(" > ")[0])[1:]
        if len(words) == 1:  # a verb, mentioned
            assert words[0] in VERBS, f"{page}: {command}"
            continue
        try:
            assert parse(words) is not None
        except RequestError as error:
            raise AssertionError(f"{page}: {command}: {error}") from None


@pytest.mark.parametrize("page", WRITTEN)
def test_files_and_links_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    packages = "bench|engine|loading|models|nn|ops|train|cli"
    for path in re.findall(rf"`((?:{packages})/\w+(?:/\w+)?\.py)`", text):
        assert (ROOT / "src" / "rooflax" / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_every_model_in_a_command_has_a_name_that_can_be_found(page: str) -> None:
    """A preset, a hub id with its owner, a folder, a GGUF file or a placeholder: "gpt2" is none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    verbs = "generate|chat|bench serve|bench|inspect|train|quantize|verify|perplexity|eval"
    for name in re.findall(rf"\brooflax (?:{verbs}) (?!serve\b)([^-\s`|#)][^\s`|)]*)", text):
        assert NAMED.match(name), f"{page} names the model {name!r}"


def test_the_tree_of_folders_names_what_exists() -> None:
    (block,) = [s for s in snippets("docs/architecture.md", "text") if "\nsrc/rooflax/" in s.code]
    inside = [line.split()[0] for line in block.code.splitlines() if line.startswith("  ")]
    outside = [line.split()[0] for line in block.code.splitlines() if not line.startswith("  ")]
    for name in inside:
        assert (ROOT / "src" / "rooflax" / name).exists(), name
    for name in outside:
        assert (ROOT / name).exists(), name


def test_the_picture_is_what_the_script_draws() -> None:
    script = ROOT / "tools" / "draw_architecture.py"
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    picture = ROOT / "docs" / "images" / "architecture.svg"
    assert picture.read_text(encoding="utf-8") == ran.stdout, "run: make docs"
    ElementTree.fromstring(ran.stdout)
