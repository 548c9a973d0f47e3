"""Processes that render templates: what they may take, and that nothing of them is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import template_pool
from tests.support.loading.rendering import render

pytestmark = pytest.mark.oldest_jax

CHAT = [{"role": "user", "content": "hello"}]
GOOD = (Path(__file__).parents[2] / "data" / "chat_templates" / "llama3.jinja").read_text()
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "collisions": (
        "{% set ns = namespace(x=[]) %}{% for i in range(20000) %}"
        "{% set ns.x = ns.x + [i * (2**61 - 1)] %}{% endfor %}{{ ns.x|unique|list|length }}"
    ),
    "a range of collisions": "{{ range(0, 20000*(2**61-1), 2**61-1)|unique|list|length }}",
    "attributes of a long text": (
        "{% set s = 'a' * 30000000 %}{{ [s, s, s, s, s, s, s, s, s]|join(attribute='x') }}"
        "{{ ('{0}' * 50).format(s) }}"
    ),
    "nested statements": "{% if a %}" * 4000 + "{% endif %}" * 4000,
    "many statements": (
        "{% for i in [1] %}" + "{% if a %}{% set b = 1 %}{% endif %}" * 12000 + "{% endfor %}"
    ),
    "loops": FOR_EVER,
    "ten gigabytes": "{{ 'a' * 10000000000 }}",
    "classes": "{{ ''.__class__.__mro__ }}",
}
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

MEASURE = """
import json, resource, sys, time
from rooflax.errors import CheckpointError
from tests.support.loading.rendering import render
templates, chat = json.load(sys.stdin)
found = {}
for name, template in templates.items():
    render("x", chat)
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    try:
        said = "text " + render(template, chat)
    except CheckpointError as error:
        said = str(error)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    found[name] = said, used, time.monotonic() - begin
assert not {"jax", "jinja2"} & set(sys.modules)
from rooflax.loading import template_pool
template_pool._stop()
print(json.dumps([found, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


@linux
def test_g9_hostile_templates_end_soon_and_small():
    """In a small process: a child's peak memory begins with what its parent has."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([HOSTILE, CHAT]), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found, kibibytes = json.loads(ran.stdout)
    assert found.keys() == HOSTILE.keys()
    assert template_pool.SECONDS <= 1.25
    for said, used, seconds in found.values():
        begins = ("the chat template is rejected: ", "the chat template does what is")
        assert said.startswith(begins)
        assert "\n" not in said
        assert used < 2 * template_pool.SECONDS  # of a worker's start, too
        assert seconds < template_pool.MOST_SECONDS + 1  # a free machine takes as long as `used`
    assert kibibytes <= 256 * 1024


@pytest.fixture
def pool():
    pool = template_pool._Pool()
    yield pool
    pool.stop()


def ask(pool, template=GOOD):
    request = {
        "template": template, "variables": {"messages": CHAT}, "max_characters": 10_000,
        "marks": {}, "roles": {},
    }  # fmt: skip
    return pool.ask(json.dumps(request).encode(), 100_000)


def pids(pool):
    return {worker._process.pid for worker in pool._workers}


def is_gone(pid):
    """Neither running nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


@linux
def test_a_worker_has_limits_and_no_secrets(pool, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ask(pool)
    (pid,) = pids(pool)
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    names = {line.split(b"=")[0] for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    assert names <= {b"", b"PYTHONPATH", *(n.encode() for n in template_pool._ENVIRONMENT)}
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    soft = {line[:26].strip(): line[26:].split()[0] for line in limits}
    assert soft["Max address space"] == str(256 * 2**20)
    assert int(soft["Max cpu time"]) <= 5
    assert soft["Max file size"] == soft["Max core file size"] == "0"
    pipes = sorted(os.listdir(f"/proc/{pid}/fd"))
    assert pipes == ["0", "1", "2"]


def test_a_worker_imports_no_jax():
    code = (
        "import sys, rooflax.loading.template_worker as w; print({'jax', 'numpy'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@linux
def test_late_and_lost_workers_are_reaped_and_replaced(pool):
    ask(pool)
    (first,) = pids(pool)
    with pytest.raises(template_pool.WorkerEnded, match=r"does not finish within 1\.25 seconds"):
        ask(pool, FOR_EVER)
    assert is_gone(first)
    assert "hello" in ask(pool)["text"]
    (second,) = pids(pool)
    os.kill(second, signal.SIGKILL)
    assert "hello" in ask(pool)["text"]
    assert is_gone(second)
    assert "memory" in ask(pool, "{{ 'a' * 10**10 }}")["reason"]
    assert pids(pool) == set()
    assert "hello" in ask(pool)["text"]
    (last,) = pids(pool)
    pool.stop()
    assert is_gone(last)


def test_a_hostile_template_does_not_stop_the_others(pool):
    ended = []

    def hostile():
        with pytest.raises(template_pool.WorkerEnded):
            ask(pool, FOR_EVER)
        ended.append(time.monotonic())

    threads = [threading.Thread(target=hostile) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        assert "hello" in ask(pool)["text"]
    answered = time.monotonic()
    for thread in threads:
        thread.join()
    assert len(ended) == 2 and answered < max(ended)


def test_many_threads_share_a_few_workers():
    found, threads = {}, []

    def work(i):
        chat = [{"role": "user", "content": f"number {i}"}]
        found[i] = [render("{{ messages[0].content }}", chat) for _ in range(10)]

    for i in range(24):
        threads.append(threading.Thread(target=work, args=(i,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert found == {i: [f"number {i}"] * 10 for i in range(24)}
    assert len(template_pool._pools[os.getpid()]._workers) <= template_pool.MAX_WORKERS


PARENT = """
import os, sys, threading, time
from rooflax.loading import template_pool
from tests.support.loading.rendering import render
def late():
    try:
        render(sys.argv[2], [{"role": "user", "content": "x"}])
    except Exception:
        pass
render("x", [{"role": "user", "content": "x"}])
if sys.argv[2]:
    threading.Thread(target=late, daemon=True).start()
    time.sleep(0.5)
workers = template_pool._pools[os.getpid()]._workers
print(*(worker._process.pid for worker in workers), flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""


@linux
@pytest.mark.parametrize("template", ["", FOR_EVER])
@pytest.mark.parametrize("how", ["exit", "wait"])
def test_workers_end_with_their_parent(how, template):
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PARENT, how, template],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    (pid,) = map(int, parent.stdout.readline().split())
    if how == "wait":
        parent.kill()
    _, errors = parent.communicate(timeout=30)
    assert errors == ""
    # One that renders for ever is ended by its limit of processor time.
    deadline = time.monotonic() + 15
    while not _has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _has_ended(pid)


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@linux
def test_a_worker_that_cannot_start_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = template_pool._Pool()
    with pytest.raises(template_pool.EngineError, match="did not start"):
        ask(pool)
    assert not pool._workers


def test_answers_that_are_too_long_are_rejected():
    template = "{% for i in range(20000) %}" + "x" * 100 + "{% endfor %}"
    with pytest.raises(CheckpointError, match="writes more than"):
        render(template, CHAT)


@linux
def test_a_worker_that_was_stopped_is_given_its_time(pool):
    """As when others have the processor, or a laptop sleeps."""
    ask(pool)
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    threading.Timer(2 * template_pool.SECONDS, os.kill, (pid, signal.SIGCONT)).start()
    assert "hello" in ask(pool)["text"]
    assert time.monotonic() - begin > template_pool.SECONDS
    assert pids(pool) == {pid}


@linux
def test_a_worker_that_does_nothing_ends(pool, monkeypatch):
    monkeypatch.setattr(template_pool, "MOST_SECONDS", 2.0)
    ask(pool)
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(template_pool.WorkerEnded, match="does not finish"):
        ask(pool)
    assert is_gone(pid)
