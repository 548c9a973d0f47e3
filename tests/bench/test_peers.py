"""The comparison with other engines: verdicts, rows, and processes that stand still."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.product.snippets import ROOT

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


@pytest.fixture
def peers(monkeypatch):
    """Imports modules of the script's folder, as the script does."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module
    for name in ("plan", "engine_process", "prepare", "peers_report", "compare"):
        sys.modules.pop(name, None)


@pytest.fixture
def driver(tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(PEERS / 'drivers')!r})\n{DRIVER}")
    return path


@pytest.mark.parametrize(
    ("width", "batch", "ratio", "share", "peer_share", "met"),
    [
        ("int8", 1, 1.6, 0.5, 0.4, True),
        ("int8", 1, 1.1, 0.86, 0.7, True),
        ("int8", 1, 1.1, 0.84, 0.7, False),
        ("int4", 1, 0.95, 0.80, 0.85, False),
        ("int4", 1, 1.02, 0.91, 0.85, True),
        ("float32", 1, None, 0.95, None, True),
        ("int8", 8, 1.79, 0.9, 0.5, False),
        ("int4", 16, 1.5, 0.3, 0.2, True),
        ("bf16", 8, 0.5, 0.3, 0.6, None),
        ("int8", 4, 0.5, 0.3, 0.6, None),
        ("int8", 8, None, 0.3, None, None),
    ],
)
def test_targets(peers, width, batch, ratio, share, peer_share, met):
    found = peers("plan").decode_verdict(width, batch, ratio, share, peer_share)
    assert found.met is met


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


def test_a_job_without_a_peer_has_no_ratio(peers):
    found = peers("peers_report").with_rows(document({"rooflax": [0.5]}))
    assert found["rows"][0]["ratio"] is None
    assert peers("peers_report").rendered(found)


def test_the_page_is_that_of_the_figures(peers):
    path = ROOT / "docs" / "peers.json"
    if not path.exists():
        pytest.skip("nothing was compared yet")
    report = peers("peers_report")
    found = report.with_rows(json.loads(path.read_text(encoding="utf-8")))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.rendered(found)


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
