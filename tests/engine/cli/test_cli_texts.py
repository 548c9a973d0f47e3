"""Texts in and out: JSON lines, tokenize and detokenize, commands of a chat, shells."""

import json
import re
import shutil
import subprocess

import pytest

from rooflax import LLM, SamplingParams
from rooflax.cli import terminal
from rooflax.cli.chat_commands import HELP
from rooflax.cli.main import VERBS
from tests.support.disk import FULL, Disk, Killed

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
LINES = [
    {"prompt": "def add(a, b):", "id": "first"},
    {"prompt": [5, 6, 7], "max_tokens": 4},
    {"prompt": "import", "id": ["\ud800"], "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 5},
]
"""The last one's id is no Unicode text."""


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def batch(rooflax, tmp_path):
    """Answers `LINES`, or others, in a folder of its own."""
    output = tmp_path / "answers.jsonl"

    def run(*flags, lines=LINES):
        given = write(tmp_path / "prompts.jsonl", lines)
        return rooflax(
            "generate", TINY, "--input", given, "--output", output, "--temp", 0, "-n", 8, *flags
        )

    run.output = output
    return run


def test_lines_of_plain_text_are_prompts(rooflax, tmp_path):
    lines, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    lines.write_bytes(b'def add(a, b):\r\n\nimport {\n{"not": json\n')
    flags = ("--output", output, "--temp", 0, "-n", 3)
    assert rooflax("generate", TINY, "--input", lines, *flags).code == 0
    found = read(output)
    assert [answer["id"] for answer in found] == [1, 3, 4]
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    for answer, prompt in zip(found, ("def add(a, b):", "import {", '{"not": json'), strict=True):
        assert answer["text"] == LLM(TINY).generate(prompt, greedy)[0].text


def test_lines_are_answered_in_order_as_python_answers_them(batch):
    assert batch().code == 0
    first, second, third = read(batch.output)
    assert (first["id"], second["id"], third["id"]) == ("first", 2, ["\ud800"])
    llm = LLM(TINY)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    (wanted,) = llm.generate("def add(a, b):", greedy)
    assert (first["tokens"], first["text"]) == (list(wanted.tokens), wanted.text)
    assert len(second["tokens"]) == 4
    drawn = llm.generate("import", n=2, temperature=1.0, seed=3, max_tokens=5)
    assert [sample["tokens"] for sample in third["samples"]] == [list(c.tokens) for c in drawn]


def test_it_goes_on_where_it_was_killed(batch):
    assert batch().code == 0
    whole = batch.output.read_text()
    lines = whole.splitlines(keepends=True)
    for cut in (lines[0], lines[0] + lines[1][:9], ""):
        batch.output.write_text(cut)
        assert batch().code == 0
        assert batch.output.read_text() == whole
    ran = batch()
    assert "3 of 3 are answered already" in ran.err and batch.output.read_text() == whole


@pytest.mark.parametrize("error", [FULL, Killed()], ids=["full", "killed"])
def test_it_goes_on_from_every_write(batch, tmp_path, monkeypatch, error):
    """Whichever write of the answers is the last."""
    assert batch().code == 0
    whole, llm = batch.output.read_text(), LLM(TINY)
    monkeypatch.setattr("rooflax.cli.session.open_llm", lambda *_, **__: llm)
    for fail_at in range(1, 20):
        batch.output.unlink()
        with Disk(tmp_path, fail_at, error, spared="prompts.jsonl").watched() as disk:
            code = batch().code
        if not disk.has_failed:
            break
        assert code in (1, 2), disk.calls
        if batch.output.exists():
            assert whole.startswith(batch.output.read_text())
        assert batch().code == 0 and batch.output.read_text() == whole, disk.calls
    assert fail_at > 4


def test_what_is_there_is_not_replaced_without_force(batch):
    for mine in ("mine\n", "a line without its end", LINES[0]["prompt"]):
        batch.output.write_text(mine)
        ran = batch()
        assert ran.code == 2 and "something else than answers" in ran.err
        assert batch.output.read_text() == mine
    assert batch("--force").code == 0
    assert batch(lines=LINES[::-1]).code == 2
    assert len(read(batch.output)) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 2 of .* is not JSON"),
        ("[]", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": 5}', "Line 2 of .*: A prompt is 5"),
        ('{"prompt": "a", "heat": 1}', "'heat' is neither"),
        ('{"prompt": "a", "temperature": "x"}', "temperature is 'x'"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "has no chat template"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(rooflax, tmp_path, line, said):
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    ran = rooflax("generate", TINY, "--input", given, "--output", output)
    assert ran.code == 2 and not output.exists()
    assert re.search(said, ran.err), ran.err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("generate", TINY), "--prompt"),
        (("perplexity", TINY), "--file"),
        (("tokenize", "some text"), "--prompt"),
        (("detokenize", "1,2,3"), "--tokens"),
    ],
)
def test_nothing_is_awaited_at_a_terminal(rooflax, monkeypatch, words, flag):
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    ran = rooflax(*words)
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert f"nothing was given: say {flag}" in ran.err


def test_tokens_and_back(rooflax):
    text = "def f(x):\n    return 'é'"
    ids = rooflax("tokenize", stdin=text.encode()).out
    assert rooflax("detokenize", stdin=ids.encode()).out == text
    assert rooflax("detokenize", "--tokens", ids.strip().replace(" ", ",")).out == text
    found = json.loads(rooflax("tokenize", "-p", text, "--json").out)
    assert found["tokens"] == list(map(int, ids.split())) and found["num_tokens"] == len(
        ids.split()
    )
    ran = rooflax("detokenize", "--tokens", "1,x")
    assert ran.code == 2 and "whole numbers" in ran.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_verb_and_flag(rooflax, shell):
    script = rooflax("completion", shell).out
    assert all(word in script for verb in VERBS for word in verb.split())
    assert "max-model-len" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(rooflax):
    script = rooflax("completion", "bash").out
    ask = 'COMP_WORDS=(rooflax {}); COMP_CWORD={}; _rooflax; echo "${{COMPREPLY[@]}}"'

    def complete(words):
        line = ask.format(words, len(words.split()))
        return subprocess.run(
            ["bash", "-c", script + line], capture_output=True, text=True, check=True
        ).stdout.split()

    assert complete("perp") == ["perplexity"]
    assert complete("bench --abl") == ["--ablate"]
    assert complete("bench serve --mi") == ["--mix"]


def chat(rooflax, text, *flags):
    return rooflax("chat", TINY, "-n", 4, "--temp", 0, *flags, stdin=text.encode())


def test_commands_of_a_chat(rooflax, tmp_path):
    path = tmp_path / "talk.json"
    ran = chat(
        rooflax,
        f"/help\nhello\n/params temperature=0.5 top_k=3\n/save {path}\n/clear\n/save {path}\n"
        f"/load {path}\n/regen\n/nothing\n/params heat=1\n/system Be kind.\n",
    )
    assert ran.code == 0, ran.err
    assert all(name in ran.err for name, _ in HELP)
    saved = json.loads(path.read_text())
    assert saved["messages"][0] == {"role": "user", "content": "hello"}
    assert saved["messages"][1]["role"] == "assistant"
    assert "temperature=0.5" in ran.err and "top_k=3" in ran.err
    assert "exists; /save" in ran.err and "1 turn loaded" in ran.err
    assert "/nothing is no command; /help" in ran.err
    assert "'heat=1' is no sampling parameter" in ran.err
    assert "system message needs a chat template" in ran.err
    assert len(ran.out.splitlines()) >= 2  # the answer, and the one again


def test_a_text_of_several_lines_is_one_question(rooflax, tmp_path):
    path = tmp_path / "talk.json"
    ran = chat(rooflax, f'"""first\nsecond\n"""\n/save {path}\n', "-p", "begin")
    assert ran.code == 0, ran.err
    asked = [m["content"] for m in json.loads(path.read_text())["messages"] if m["role"] == "user"]
    assert asked == ["begin", "first\nsecond"]
    ran = chat(rooflax, '"""without end\n')
    assert ran.code == 2 and "has no end" in ran.err


@pytest.mark.parametrize("content", ["", "[]", '{"messages": 3}', '{"messages": [{"role": "x"}]}'])
def test_a_file_that_is_no_conversation_is_rejected(rooflax, tmp_path, content):
    path = tmp_path / "talk.json"
    path.write_text(content)
    ran = chat(rooflax, f"/load {path}\n/load {path}.missing\n")
    assert ran.code == 0
    assert "is no conversation that /save wrote" in ran.err and "cannot be read" in ran.err


def test_a_model_is_not_replaced_without_force(rooflax, tmp_path):
    write_it = ("quantize", TINY, "-q", "int8", "-o", tmp_path / "small")
    assert rooflax(*write_it).code == 0
    before = (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns
    ran = rooflax(*write_it)
    assert ran.code == 2 and "holds a model; give another folder" in ran.err
    assert (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns == before
    assert rooflax(*write_it, "--force").code == 0
