"""The embedded model: what its card says is so, and transformers reads it as we do."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rooflax import LLM, SamplingParams
from rooflax.loading.model_info import embedded_folder
from rooflax.models.presets import CHAT_NAME, EMBEDDED_NAME
from tests.support.product.snippets import ROOT

pytestmark = [pytest.mark.first, pytest.mark.oldest_jax]

PROMPTS = ["def read_config(path):\n", "import os\nimport", "class Stack:\n    def __init__(self"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def cli(*args: str, **env: str) -> dict:
    """A command's --json document, compiled as a user's."""
    done = subprocess.run(
        [sys.executable, "-m", "rooflax", *args, "--json"],
        env={**os.environ, "XLA_FLAGS": "", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_it_is_small() -> None:
    assert (embedded_folder() / "model.safetensors").stat().st_size <= 16_000_000


def test_held_out_text_is_200_kb_with_its_licence() -> None:
    size = (ROOT / "tests/data/python_held_out.txt").stat().st_size
    assert 190_000 <= size <= 200_000
    licence = (ROOT / "tests/data/PYTHON-LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence


@pytest.mark.every_jax
def test_first_run_compiles_little_and_the_second_nothing(tmp_path: Path) -> None:
    args = ("generate", "-p", PROMPTS[0], "-n", "100", "--temperature", "0")
    first, second = (cli(*args, ROOFLAX_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert 1 <= first["timings"]["compilations"] <= 4
    assert second["timings"]["compilations"] == 0
    assert first["tokens"] == second["tokens"]


def test_it_writes_lines_that_python_reads(llm: LLM) -> None:
    """Whole lines outside docstrings are Python by themselves, indented by four: greedy, and as the
    card samples."""
    wanted = [(SamplingParams(max_tokens=120, temperature=0), 0.9)]
    wanted += [(SamplingParams(max_tokens=120, seed=seed), 0.75) for seed in range(3)]
    for params, share in wanted:
        texts = [completion.text for completion in llm.generate(PROMPTS, params)]
        lines = [line for text in texts for line in lines_of_code(text) if line.strip()]
        assert len(lines) >= 10
        assert sum(map(is_python, lines)) >= share * len(lines)
        indented = [len(line) - len(line.lstrip()) for line in lines]
        assert sum(n % 4 == 0 for n in indented) >= 0.9 * len(lines)


def lines_of_code(text: str) -> list[str]:
    """Lines without those of docstrings, the first and the last line."""
    lines, is_text = [], False
    for line in text.split("\n")[:-1]:
        marks = line.count('"""')
        if not is_text and not marks:
            lines.append(line)
        is_text ^= marks % 2 == 1
    return lines[1:]


def is_python(line: str) -> bool:
    """Whether a line is a statement, or the first line of one."""
    line = line.strip()
    before = {"elif": "if 1: pass", "else": "if 1: pass", "except": "try: pass"}
    before["finally"] = before["except"]
    word = re.match(r"\w*", line)
    lead = before.get(word.group() if word else "", "")
    for end in ("", " pass"):
        try:
            ast.parse(f"{lead}\n{line}{end}")
        except SyntaxError:
            continue
        return True
    return False


@pytest.mark.parametrize("name", [EMBEDDED_NAME, CHAT_NAME])
def test_it_becomes_a_gguf_file(name: str, tmp_path: Path) -> None:
    """GGUF has a name for how its tokenizer cuts text, so that llama.cpp opens it."""
    path = tmp_path / "model.gguf"
    cli("quantize", name, "--gguf", "BF16", "-o", str(path))
    text = (ROOT / "tests/data/python_held_out.txt").read_text(encoding="utf-8")[:20_000]
    folder, file = LLM(name), LLM(path)
    assert file.encode(text) == folder.encode(text)
    assert file.tokenizer.chat_template == folder.tokenizer.chat_template
    params = SamplingParams(max_tokens=24, temperature=0)
    wanted, found = (llm.generate(PROMPTS, params) for llm in (folder, file))
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


def test_transformers_gives_the_same_greedy_tokens(llm: LLM) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    folder = embedded_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        assert ids == llm.encode(prompt)
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=48, min_new_tokens=48, do_sample=False
        )
        (ours,) = llm.generate([prompt], params)
        assert list(ours.tokens) == out[0, len(ids) :].tolist()
