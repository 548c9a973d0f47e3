"""Longer tests beside those of tests/engine/test_processes.py."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from rooflax import LLM, SamplingParams
from tests import processes
from tests.sharding import DEVICES, NEW_TOKENS, VOCAB, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


PROMPTS = [np.random.RandomState(n).randint(0, VOCAB, n).tolist() for n in (5, 16, 17, 33, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    made = {}

    def get(name):
        if name not in made:
            made[name] = write_checkpoint(root, name)
        return made[name]

    return get


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("gpt_oss", "stage=2,tensor=4"),
        ("llama", "data=2,tensor=4"),
        ("gpt_oss", "expert=4,tensor=2"),
        ("qwen2", "sequence=2,data=4"),
    ],
)
def test_two_processes_give_the_single_devices_tokens(folder, model, mesh):
    path = folder(model)
    found = processes.ask("tokens", path, mesh)
    llm = LLM(path)
    wanted = [list(c.tokens) for c in llm.generate(PROMPTS, GREEDY)]
    for own in found:
        assert "error" not in own, own
        assert own["tokens"] == wanted
        np.testing.assert_allclose(own["logits"], llm.logits(PROMPTS[2])[:, ::7], rtol=0, atol=1e-5)
        assert len(own["bytes"]) == DEVICES // 2


def test_only_the_first_process_prints(folder):
    """Through the command line, as one types it on each host."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rooflax", "generate", str(folder("llama")), "-p", "the end"]
    command += ["-n", "4", "--temp", "0", "--json", "--mesh", "tensor=4", "--platform", "cpu"]
    command += ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"]
    running = [
        subprocess.Popen(
            [*command, str(i)],
            env=processes.devices(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    (first, errors), (second, _) = (process.communicate(timeout=280) for process in running)
    assert second == "" and [process.returncode for process in running] == [0, 0], errors
    found = json.loads(first)
    assert found["devices"] == 4
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert found["tokens"] == list(LLM(folder("llama")).generate("the end", params)[0].tokens)
