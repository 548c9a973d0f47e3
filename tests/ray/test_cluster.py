"""Ray's examples on a cluster of this machine, with the embedded chat model: make ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from examples import ray_serve
from rooflax import LLM

ROOT = Path(__file__).resolve().parents[2]
PORT = 18650
URL = f"http://127.0.0.1:{PORT}"
MODEL = "rooflax-chat-5m"
ASK = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.0}
LONG = {"prompt": "def add(a, b):", "max_tokens": 400, "ignore_eos": True, "stream": True}
SESSION = "x-session-id"


def wait_for(holds: Any, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.2)


def deploy(version: str = "1") -> None:
    """Two replicas of two slots and two places, on a thread each."""
    given = {"max_num_seqs": 2, "max_model_len": 512}
    server = ray_serve.Server.options(
        autoscaling_config=None,
        num_replicas=2,
        max_ongoing_requests=8,
        max_queued_requests=4,
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": {"OF_VERSION": version}}},
    )
    serve.run(server.bind(MODEL, given), name="rooflax")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["PYTHONPATH"] = str(ROOT)
    # Processors that are counted, not had: Ray Data waits for its own beside the replicas'.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deploy()
    yield
    serve.shutdown()
    ray.shutdown()


def ask(session: str | None = None, **more: Any) -> httpx.Response:
    headers = {SESSION: session} if session else {}
    return httpx.post(
        f"{URL}/v1/completions", json=ASK | more, headers=headers, timeout=120, trust_env=False
    )


def metric(session: str, name: str, label: str = "") -> float:
    """Of the replica that a session stays with; of series with a label, their sum."""
    text = httpx.get(f"{URL}/metrics", headers={SESSION: session}, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.split()[-1]) for line in lines)


def replicas() -> set[int]:
    """Their processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::ServeReplica:rooflax:Server"):
                found.add(int(path.parent.name))
    return found


def test_every_replica_answers_as_one_model_alone(cluster):
    wanted = LLM(MODEL).generate(ASK["prompt"], max_tokens=24, temperature=0.0)[0].text
    assert {ask(name).json()["choices"][0]["text"] for name in map(str, range(8))} == {wanted}


def test_a_stream_begins_before_it_ends(cluster):
    times = []
    with httpx.stream("POST", f"{URL}/v1/completions", json=LONG, trust_env=False, timeout=60) as s:
        times.extend(time.monotonic() for line in s.iter_lines() if line.startswith("data:"))
    assert len(times) > 2 and times[-1] - times[0] > 0.1, times


def test_c2_a_client_that_leaves_ends_its_request_in_the_replica(cluster):
    ended = ("leaving", "vllm:request_success_total", 'finished_reason="abort"')
    before = metric(*ended)
    headers = {SESSION: "leaving"}
    with httpx.stream(
        "POST", f"{URL}/v1/completions", json=LONG, headers=headers, trust_env=False
    ) as stream:
        next(stream.iter_lines())
    wait_for(lambda: metric(*ended) == before + 1, 20)
    wait_for(lambda: metric("leaving", "vllm:num_requests_running") == 0, 20)


def test_c1_overload_is_turned_away(cluster):
    with ThreadPoolExecutor(60) as pool:
        found = list(pool.map(lambda n: ask(max_tokens=200, ignore_eos=True), range(60)))
    statuses = {one.status_code for one in found}
    assert statuses <= {200, 429, 503} and 200 in statuses and len(statuses) > 1
    assert ask().status_code == 200


def test_c9_a_killed_replica_comes_back(cluster):
    before = replicas()
    victim = min(before)
    answers: list[int] = []
    ends = threading.Event()

    def go_on() -> None:
        while not ends.is_set():
            try:
                answers.append(ask().status_code)
            except httpx.HTTPError:
                answers.append(0)

    asking = threading.Thread(target=go_on, daemon=True)
    asking.start()
    os.kill(victim, signal.SIGKILL)
    try:
        wait_for(lambda: len(replicas()) == 2 and victim not in replicas())
        wait_for(lambda: serve.status().applications["rooflax"].status == "RUNNING")
    finally:
        ends.set()
    asking.join()
    lost = sum(status != 200 for status in answers)
    assert lost <= 3 and len(answers) > lost, answers


def test_c8_a_new_version_drains_the_old(cluster):
    text = ""

    def read() -> None:
        nonlocal text
        with httpx.stream(
            "POST", f"{URL}/v1/completions", json=LONG, trust_env=False, timeout=90
        ) as s:
            for piece in s.iter_text():
                text += piece

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: "data:" in text)
    deploy("2")
    reader.join(60)
    assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
    assert ask().status_code == 200


@pytest.mark.parametrize("way", ["actors", "server"])
def test_a_batch_equals_one_model_alone(cluster, tmp_path, way):
    prompts = ["def add(a, b):", "import ", "class Stack:", "for i in"]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    command = [sys.executable, str(ROOT / "examples" / "ray_data.py"), str(source)]
    command += [str(tmp_path / "out"), *(["--url", URL] if way == "server" else [])]
    address = ray.get_runtime_context().gcs_address
    env = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line for path in (tmp_path / "out").iterdir() for line in path.open()]
    found = {row["prompt"]: row["text"] for row in map(json.loads, lines)}
    done = LLM(MODEL).generate(prompts, max_tokens=64, temperature=0.0)
    assert found == dict(zip(prompts, (one.text for one in done), strict=True))
