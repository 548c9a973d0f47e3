"""One model served by two processes of two simulated devices each: `serve --coordinator`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from rooflax import LLM, AsyncLLM, SamplingParams
from rooflax.engine.lockstep import GROUP, Lockstep
from rooflax.errors import EngineError, RequestError
from tests import processes
from tests.sharding import VOCAB, write_checkpoint
from tests.support.server.live import wait_for

PROMPTS = [np.random.RandomState(n).randint(0, VOCAB, n).tolist() for n in (5, 33, 9, 60)]
LOST_S = 30
SENTENCE = "rooflax: another process of the job was lost, so this one ends.\n"


class Job:
    """Two processes that serve one model; what each says on stderr."""

    def __init__(self, folder, *flags, differing=((), ())):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "rooflax", "serve", str(folder), "--platform", "cpu"]
        command += ["--port", "0", "--mesh", "tensor=2,data=2", *flags]
        command += ["--coordinator", f"localhost:{port}", "--num-processes", "2"]
        env = processes.devices(2)
        self.said = ["", ""]
        self.processes = [
            subprocess.Popen(
                [*command, "--process-id", str(index), *differing[index]],
                env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            )
            for index in range(2)
        ]  # fmt: skip
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(2)]
        for reader in self._readers:
            reader.start()

    def _read(self, index):
        for line in self.processes[index].stderr:
            self.said[index] += line

    def ready(self):
        """The server's URL, once it serves."""
        wait_for(lambda: "is ready" in self.said[0] or self.ended(0), 180)
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", self.said[0])
        assert found and not self.ended(0), self.said
        return found[1]

    def ended(self, index):
        return self.processes[index].poll() is not None

    def codes(self, timeout_s=LOST_S):
        """Exit codes, once all have ended."""
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def close(self):
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.kill()
            process.wait()
            reader.join(10)
            process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served"), "llama")


@pytest.fixture
def serve(folder):
    jobs = []

    def start(*flags, **more):
        jobs.append(Job(folder, *flags, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def ask(url, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)


def run_ahead(job, url):
    """Stops the other process while the first one takes steps that need no other."""
    body = {"prompt": [1, 2], "max_tokens": GROUP, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        pieces = answer.iter_text()
        assert next(pieces)
        job.processes[1].send_signal(signal.SIGSTOP)
        try:
            assert "".join(pieces).endswith("data: [DONE]\n\n")
        finally:
            job.processes[1].send_signal(signal.SIGCONT)


def test_tokens_are_those_of_one_process_and_a_signal_to_all_drains(folder, serve):
    job = serve()
    url = job.ready()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: ask(url, prompt), PROMPTS))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wanted = [list(c.tokens) for c in LLM(folder).generate(PROMPTS, greedy)]
    assert [a.json()["choices"][0]["token_ids"] for a in answers] == wanted
    drawn = [ask(url, PROMPTS[0], temperature=1, seed=7, presence_penalty=1).json() for _ in "ab"]
    assert drawn[0]["choices"] == drawn[1]["choices"]
    json_ = {"type": "json_schema", "json_schema": {"schema": {"enum": [12]}, "name": "n"}}
    formed = ask(url, "a number: ", response_format=json_, ignore_eos=False).json()
    assert formed["choices"][0]["text"] == "12"
    many = [ask(url, [n, n + 1], max_tokens=1).status_code for n in range(2 * GROUP)]
    assert set(many) == {200}  # their keys are deleted by and by
    run_ahead(job, url)
    assert ask(url, PROMPTS[0]).json()["choices"] == answers[0].json()["choices"]

    texts = []

    def stream():
        body = {"prompt": PROMPTS[1], "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for piece in answer.iter_text():
                texts.append(piece)

    reader = threading.Thread(target=stream)
    reader.start()
    wait_for(lambda: bool(texts))
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    assert job.codes() == [0, 0], job.said
    reader.join(30)
    assert "".join(texts).endswith("data: [DONE]\n\n")
    assert "Traceback" not in "".join(job.said)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other_with_one_sentence(serve, lost):
    job = serve()
    url = job.ready()
    assert ask(url, PROMPTS[0]).status_code == 200
    before, begun = len(job.said[1 - lost]), time.monotonic()
    job.processes[lost].kill()
    codes = job.codes()
    assert time.monotonic() - begun < LOST_S
    assert codes[1 - lost] == 1
    assert job.said[1 - lost][before:] == SENTENCE


def test_processes_that_were_started_differently_are_told(serve):
    job = serve(differing=(("--max-num-seqs", "3"), ("--max-num-seqs", "2")))
    assert job.codes(90) == [2, 2], job.said
    assert "--max-num-seqs is" in job.said[0] + job.said[1]


class Store:
    """The key-value store of JAX's distributed client, in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def key_value_delete(self, prefix):
        with self.changed:
            for key in [key for key in self.values if key.startswith(prefix)]:
                del self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000), key
            return self.values[key]


@pytest.fixture
def pair(monkeypatch):
    store = Store()
    monkeypatch.setattr("jax._src.distributed.global_state.client", store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    made = []
    for rank in (0, 1):
        monkeypatch.setattr("jax.process_index", lambda rank=rank: rank)
        made.append(Lockstep())
    return store, *made


def test_calls_arrive_as_they_were_sent(pair):
    _, leader, other = pair
    assert leader.leads and not other.leads
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), None, np.zeros((0, 3), np.float32)]
    arrays.append(np.array([True, False]))
    leader.send("step", *arrays, shape=["decode", 2, 2, 64], greedy=False)
    leader.end(None)
    ((name, facts, found),) = other.calls()
    assert (name, facts) == ("step", {"shape": ["decode", 2, 2, 64], "greedy": False})
    for array, wanted in zip(found, arrays, strict=True):
        if wanted is None:
            assert array is None
        else:
            np.testing.assert_array_equal(array, wanted)
            assert array.dtype == wanted.dtype and array.shape == wanted.shape


def test_a_failure_of_the_first_is_one_of_all(pair):
    _, leader, other = pair
    leader.end("the disk is full")
    with pytest.raises(EngineError, match="process 0 ended: the disk is full"):
        list(other.calls())


def test_calls_stay_until_all_have_read_them(pair):
    store, leader, other = pair
    most = 0

    def lead():
        nonlocal most
        for _ in range(6 * GROUP):
            leader.send("copy")
            most = max(most, len(store.values))
        leader.end(None)

    leading = threading.Thread(target=lead)
    leading.start()
    wait_for(lambda: len(store.values) == 2 * GROUP)
    assert len(list(other.calls())) == 6 * GROUP
    leading.join(10)
    assert not leading.is_alive() and most <= 2 * GROUP + 2 and len(store.values) <= 2 * GROUP + 2


def test_a_second_process_makes_no_async_llm(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with pytest.raises(RequestError, match=r"call AsyncLLM\.follow"):
        AsyncLLM("preset:qwen2.5-tiny")
