"""The main jobs with the flags that users have: no XLA_FLAGS, no shape checks, one device."""

import json
import os
import subprocess
import sys

import pytest

from rooflax import LLM
from tests.support.product.snippets import ROOT


@pytest.fixture(scope="module")
def found():
    """What tests/support/product/as_users.py prints."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.product.as_users"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("job", ["generate", "chat", "bench"])
def test_commands_succeed(found, job):
    assert found["flags"] is None
    assert found[job]["code"] == 0, found[job]["err"]


def test_generate_gives_the_tokens_of_this_process(found):
    """Programs that XLA optimises and programs that it does not choose the same greedy tokens."""
    said = json.loads(found["generate"]["out"])
    (here,) = LLM().generate(["def add(a, b):"], max_tokens=12, temperature=0.0)
    assert said["text"] == here.text


def test_chat_answers(found):
    assert "len([4, 5, 6])" in found["chat"]["out"]


def test_bench_has_figures(found):
    (result,) = json.loads(found["bench"]["out"])["results"]
    assert result["decode_tok_per_s"]["trials"] and result["prefill_tok_per_s"]["trials"]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_logits_are_the_same_bits_alone_batched_and_chunked(found, quantize):
    if "skipped" in found[quantize]:
        pytest.skip(found[quantize]["skipped"])
    assert "failed" not in found[quantize], found[quantize]["failed"]
