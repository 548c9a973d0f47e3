"""The comparison with other engines: verdicts, rows, and processes that stand still."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.product.snippets import ROOT

PEERS = ROOT / "benchmarks" / "peers"
DRIVER = """
from serve import serve

class Engine:
    def about(self):
        return {"version": "1"}

    def open(self, job):
        return {"tokens": job.batch * job.prompt_tokens, "first": job.prompt(0)[0]}

    def trial(self):
        print("a library talks")
        raise ValueError("no trials here")

serve(Engine)
"""
SERVING_DRIVER = """
from serve import clock, seen, serve

class Engine:
    compilations = 1

    def about(self):
        return {"version": "1"}

    def open(self, job):
        self.part = "decode_s" if job.new_tokens else "prefill_s"
        return {}

    def trial(self):
        return {self.part: 0.5}

    def open_serving(self, job):
        self.job = job
        return {"prompt_tokens": [len(p) for p in job.prompts(0)]}

    def serve(self, by, arrivals):
        late = {"AsyncLLM": 0.01, "LLM.generate": 0.02, "llama.cpp": 0.03}[by]
        tokens = [(i + 1) * late for i in range(self.job.new_tokens)]
        found = seen(self.job, arrivals, [[at + t for t in tokens] for at in arrivals])
        found["compilations"], Engine.compilations = Engine.compilations, 0
        return found

serve(Engine)
"""


@pytest.fixture
def peers(monkeypatch):
    """Imports modules of the script's folder, as the script does."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module
    for name in ("plan", "engine_process", "prepare", "serving", "compare"):
        sys.modules.pop(name, None)
    for name in ("peers_report", "peers_plot"):
        sys.modules.pop(name, None)


def script(tmp_path, code):
    path = tmp_path / "driver.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(PEERS / 'drivers')!r})\n{code}")
    return path


@pytest.fixture
def driver(tmp_path):
    return script(tmp_path, DRIVER)


@pytest.fixture
def protocol(monkeypatch):
    """What the drivers share."""
    monkeypatch.syspath_prepend(str(PEERS / "drivers"))
    yield importlib.import_module("serve")
    sys.modules.pop("serve", None)


@pytest.mark.parametrize(
    ("model", "width", "batch", "ratio", "share", "peer_share", "met"),
    [
        ("gpt2", "int8", 1, 1.6, 0.5, 0.4, True),
        ("gpt2", "int8", 1, 1.1, 0.86, 0.7, True),
        ("gpt2", "int8", 1, 1.1, 0.84, 0.7, False),
        ("gpt2", "int4", 1, 0.95, 0.80, 0.85, False),
        ("gpt2", "int4", 1, 1.02, 0.91, 0.85, True),
        ("gpt2", "float32", 1, None, 0.95, None, True),
        ("gpt2", "int8", 8, 1.79, 0.9, 0.5, False),
        ("gpt2", "int4", 16, 1.5, 0.3, 0.2, True),
        ("gpt2", "bf16", 8, 0.5, 0.3, 0.6, None),
        ("gpt2", "int8", 4, 0.5, 0.3, 0.6, None),
        ("gpt2", "int8", 8, None, 0.3, None, None),
        ("qwen3-0.6b", "int8", 1, 1.1, 0.86, 0.7, True),
        ("gemma-3-270m", "int4", 1, 1.1, 0.70, 0.7, False),
        ("qwen3-0.6b", "int8", 8, 1.0, 0.3, 0.2, None),
        ("qwen3-moe-3b", "int4", 1, 0.5, 0.66, 0.4, True),
        ("qwen3-moe-3b", "int4", 1, 1.9, 0.64, 0.4, False),
        ("lfm2-350m", "float32", 1, 1.2, 0.3, 0.2, True),
        ("qwen3.5-0.8b", "int8", 1, 1.19, 0.95, 0.9, False),
        ("lfm2-350m", "int8", 1, None, 0.95, None, None),
    ],
)
def test_targets(peers, model, width, batch, ratio, share, peer_share, met):
    found = peers("plan").decode_verdict(model, width, batch, ratio, share, peer_share)
    assert found.met is met


def test_the_target_of_prefill_is_that_of_the_model(peers):
    report = peers("peers_report")
    for model, target, met in (("gpt2", ">= 1.1x", False), ("lfm2-350m", ">= 1.0x", True)):
        engines = {
            name: {"tok_per_s": {"median": speed}, "format": "x"}
            for name, speed in (("rooflax", 105.0), ("llama.cpp", 100.0))
        }
        row = {"test": "prefill", "model": model, "batch": 8, "prompt_tokens": 64}
        (found,) = report.best_prefill([row | {"engines": engines}])
        assert (found["target"], found["met"]) == (target, met)


def document(decode_s):
    """One job of batch 8, two engines; the trials of each take `decode_s[engine]`."""
    reading = {"read_gb_per_s": 50.0, "flops_per_s": 1e12, "source": "native"}
    cost = {"weight_bytes": 10**8, "kv_bytes": 0, "operations": 10**9}
    opened = {"costs": {"decode": cost, "prefill": cost}, "dtype": "int8"}

    def trial(seconds):
        return {"prefill_s": 0.1, "decode_s": seconds, "before": reading, "after": reading}

    engines = {
        name: {"format": "x", "opened": opened, "trials": [trial(s) for s in times]}
        for name, times in decode_s.items()
    }
    job = {"model": "gpt2", "width": "int8", "batch": 8, "prompt_tokens": 64, "new_tokens": 64}
    state = {"cpu": "a", "load_average": 0.1, "jax": "1", "python": "3", "date": "today"}
    return {
        "environment": state,
        "machine_after": state,
        "seconds": 1.0,
        "settings": {"quick": True, "rounds": 5, "threads": 2},
        "engines": {"rooflax": {"version": "1"}, "llama.cpp": {"version": "2"}, "OpenVINO": "lost"},
        "problems": ["something was not measured"],
        "jobs": [job | {"engines": engines}],
    }


def test_rows_come_from_the_trials(peers):
    times = {"rooflax": [0.5] * 5, "llama.cpp": [1.0] * 5}
    found = peers("peers_report").with_rows(document(times))
    decode, prefill = found["rows"]
    assert (decode["test"], prefill["test"]) == ("decode", "prefill")
    assert decode["engines"]["rooflax"]["tok_per_s"]["median"] == pytest.approx(8 * 64 / 0.5)
    assert decode["ratio"] == pytest.approx(2.0)
    assert decode["met"] is True
    assert decode["interval"]["low"] == pytest.approx(2.0)
    # 0.1 GB at 50 GB/s is 2 ms; a step takes 0.5 s / 64
    assert decode["engines"]["rooflax"]["roofline"] == pytest.approx(2e-3 * 64 / 0.5)
    assert found["best_prefill"][0]["ratio"] == pytest.approx(1.0)
    assert json.loads(peers("compare").written(found)) == found
    page = peers("peers_report").rendered(found)
    assert "something was not measured" in page
    assert "OpenVINO lost" in page


def test_the_plot_has_a_bar_with_its_ratio_for_each_row(peers):
    times = {"rooflax": [0.5] * 5, "llama.cpp": [1.0] * 5}
    found = peers("peers_report").with_rows(document(times))
    picture = peers("peers_plot").plot(found)
    assert picture.count("2.00x of llama.cpp") == 1
    assert "decode 8 x 64" in picture
    page = peers("peers_report").rendered(found, "peers.svg")
    assert "](peers.svg)" in page


def test_a_job_without_a_peer_has_no_ratio(peers):
    found = peers("peers_report").with_rows(document({"rooflax": [0.5]}))
    assert found["rows"][0]["ratio"] is None
    assert peers("peers_report").rendered(found)
    assert peers("peers_plot").plot(found) is None


def test_an_engine_stands_still_until_it_is_asked(peers, driver, tmp_path):
    process = peers("engine_process")
    log = tmp_path / "log"
    engine = process.EngineProcess("fake", [sys.executable, str(driver)], {}, log)
    try:
        assert engine.about == {"version": "1"}
        found = engine.ask(do="open", batch=2, prompt_tokens=8, new_tokens=1)
        assert found == {"tokens": 16, "first": 3}
        status = Path(f"/proc/{engine.process.pid}/stat").read_text()
        assert status.rpartition(")")[2].split()[0] == "T"
        with pytest.raises(process.EngineFailed, match="no trials here"):
            engine.ask(do="trial")
    finally:
        engine.close()
    assert engine.process.returncode == 0
    assert "a library talks" in log.read_text()


def test_an_engine_that_does_not_start_says_so(peers, tmp_path):
    process = peers("engine_process")
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(process.EngineFailed, match="ended"):
        process.EngineProcess("fake", command, {}, tmp_path / "log")


def test_prompts_that_are_served_are_unequal_and_never_begin_alike(protocol):
    job = protocol.ServingJob(requests=32, new_tokens=64, slots=16)
    first, second = job.prompts(0), job.prompts(1)
    assert (min(map(len, first)), max(map(len, first))) == (48, 87)
    assert first[2][:2] == [25, 32]
    assert len({prompt[0] for run in range(20) for prompt in job.prompts(run)}) == 20 * 32
    assert [len(p) for p in first] == [len(p) for p in second]


def test_what_callers_see(protocol):
    job = protocol.ServingJob(requests=2, new_tokens=3, slots=2)
    found = protocol.seen(job, [0.0, 1.0], [[0.5, 0.5, 2.0], [1.2, 1.3, 1.4]])
    expected = {"seconds": 2.0, "ttft_p50_s": 0.2, "ttft_p99_s": 0.5, "longest_gap_s": 1.5}
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"\[3, 2\] tokens came"):
        protocol.seen(job, [0.0, 0.0], [[1, 2, 3], [1, 2]])


def test_arrivals_are_those_of_the_seed_at_their_rate(peers):
    plan = peers("plan")
    times = plan.poisson(2.0, 4000, seed=0)
    assert times == plan.poisson(2.0, 4000, seed=0) != plan.poisson(2.0, 4000, seed=1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(2.0, rel=0.05)


def test_the_ideal_time_is_that_of_its_parts(peers):
    # 512 prompt tokens a second, 2048 new ones
    found = peers("plan").ideal_s(1024, 4096, {"prefill": 1.0, "decode": 0.5})
    assert found == pytest.approx(2.0 + 2.0)


def serving_engines(peers, tmp_path, count):
    path, process = script(tmp_path, SERVING_DRIVER), peers("engine_process")
    command = [sys.executable, str(path)]
    return [process.EngineProcess("fake", command, {}, tmp_path / "log") for _ in range(count)]


def run_serving(peers, tmp_path, names):
    problems, engines = [], serving_engines(peers, tmp_path, len(names) + 3)
    try:
        server = peers("serving").Serving("gpt2 int8", engines, names, 2, problems.append)
        return list(server.run()), problems
    finally:
        for engine in engines:
            engine.close()


def test_serving_takes_turns_and_leaves_out_a_trial_that_compiled(peers, tmp_path):
    (at_once, spread), problems = run_serving(peers, tmp_path, ["llama.cpp"])
    assert problems == []
    assert list(at_once["engines"]) == ["AsyncLLM", "LLM.generate", "llama.cpp"]
    assert list(spread["engines"]) == ["AsyncLLM", "llama.cpp"]
    assert at_once["parts"] == [{"prefill": 0.5, "decode": 0.5}] * 2
    for found in (at_once, spread):
        for engine in found["engines"].values():
            assert [set(t) for t in engine["trials"]] == [
                {"seconds", "ttft_p50_s", "ttft_p99_s", "longest_gap_s"}
            ] * 2
    assert at_once["engines"]["llama.cpp"]["trials"][0]["seconds"] == pytest.approx(64 * 0.03)
    assert spread["rate"] == pytest.approx(0.6 * 32 / (64 * 0.03))


def test_without_the_peer_there_is_no_rate(peers, tmp_path):
    (at_once,), problems = run_serving(peers, tmp_path, [])
    assert list(at_once["engines"]) == ["AsyncLLM", "LLM.generate"]
    (sentence,) = problems
    assert "Poisson" in sentence


def served(seconds, ttft_s, gap_s=0.1):
    trial = {"seconds": seconds, "ttft_p50_s": ttft_s, "ttft_p99_s": ttft_s, "longest_gap_s": gap_s}
    return {"trials": [trial] * 3}


def serving_document(ours, generate, theirs, cpu="a (avx2)", our_wait=0.1, gap_s=0.1):
    """Both kinds of arrivals; the ideal time is 1.5 s."""
    found = document({"rooflax": [0.5]})
    head = {"model": "gpt2", "width": "int8", "requests": 32, "new_tokens": 64, "slots": 16}
    head["prompt_tokens"] = [64] * 32
    parts = {"prefill": 0.125, "decode": 0.5}
    engines = {"AsyncLLM": served(ours, 0.1, gap_s), "LLM.generate": served(generate, 0.1)}
    peer = {} if theirs is None else {"llama.cpp": served(theirs, 0.2)}
    found["serving"] = [
        head | {"load": "at once", "engines": engines | peer, "parts": [parts] * 3},
        head
        | {
            "load": "Poisson",
            "rate": 1.0,
            "engines": {"AsyncLLM": served(30.0, our_wait)} | peer,
        },
    ]
    found["environment"] = found["environment"] | {"cpu": cpu}
    return found


@pytest.mark.parametrize(
    ("given", "met"),
    [
        ({"ours": 1.7, "generate": 1.6, "theirs": 3.5}, [True, True, True]),
        ({"ours": 1.7, "generate": 1.6, "theirs": 3.3}, [False, True, True]),
        ({"ours": 1.7, "generate": 1.8, "theirs": 4.0, "cpu": "a (avx512)"}, [False, False, True]),
        ({"ours": 1.7, "generate": 1.6, "theirs": 4.3, "cpu": "a (avx512)"}, [True, True, True]),
        ({"ours": 1.8, "generate": 1.6, "theirs": 4.0}, [False, True, True]),
        ({"ours": 1.7, "generate": 1.6, "theirs": 4.0, "gap_s": 1.1}, [False, True, True]),
        ({"ours": 1.7, "generate": 1.6, "theirs": 4.0, "our_wait": 0.3}, [True, True, False]),
        ({"ours": 1.7, "generate": 1.6, "theirs": None}, [None, True, None]),
    ],
)
def test_targets_of_serving(peers, given, met):
    report = peers("peers_report")
    found = report.with_rows(serving_document(**given))
    rows = [row for row in found["serving_rows"] if row["engine"] != "llama.cpp"]
    assert [row["met"] for row in rows] == met
    assert rows[0]["of_ideal"] == pytest.approx(1.5 / given["ours"])
    page = report.rendered(found)
    assert page.count("| gpt2 int8 | at once | AsyncLLM |") == 1
    assert ("- serving gpt2 int8 by" in page) == (False in met)


def test_a_page_of_serving_alone(peers):
    report = peers("peers_report")
    found = serving_document(1.7, 1.6, 4.0) | {"jobs": []}
    page = report.rendered(report.with_rows(found))
    assert "## Serving" in page
    assert "steps after the first token" not in page
    assert "| gpt2 int8 | Poisson 1.00/s | llama.cpp |" in page


def test_a_peer_whose_builder_does_not_know_the_model_says_so(peers, tmp_path):
    prepare = peers("prepare")
    at = prepare.Installation(tmp_path / "python", tmp_path, tmp_path, tmp_path)
    with pytest.raises(prepare.Unavailable, match="does not know gpt2"):
        at.command("onnxruntime-genai", "gpt2", "int4", 2)


def test_llama_cpps_files_are_made_of_its_own_types(peers, tmp_path):
    """The published files' width is none of them."""
    prepare = peers("prepare")
    at = prepare.Installation(tmp_path / "python", tmp_path, tmp_path, tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "convert_hf_to_gguf.py").touch()
    at.python.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\nexit 1\n')
    at.python.chmod(0o755)
    with pytest.raises(prepare.Unavailable):
        at.command("llama.cpp", "gpt2", "int8", 2)
    asked = (tmp_path / "asked").read_text()
    assert " f32 bf16 q8_0 q4_0 --pre " in asked
