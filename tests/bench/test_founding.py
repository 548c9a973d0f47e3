"""The tables of the seed documents without their measurements: arithmetic, verdicts, the page."""

import json
import subprocess
import sys

import pytest

from benchmarks.founding import SMOKE, STEPS, WANTED, Settings, Shape, counted, failures, markdown
from rooflax.loading.model_info import model_info
from tests.product.snippets import ROOT

pytestmark = pytest.mark.oldest_jax


def test_a_cache_saves_operations_and_hardly_any_bytes():
    operations, num_bytes = counted(Settings().gpt2)
    assert 6.5 < operations < 7.5
    assert num_bytes == pytest.approx(1.0, abs=1e-3)


def test_operations_grow_with_the_tokens_that_are_run():
    """4 + 5 + 6 tokens against 4 + 1 + 1; their attention and the LM head differ a little."""
    shape = Shape("preset:gpt2", 4, 3)
    assert counted(shape)[0] == pytest.approx(15 / 6, rel=0.2)
    assert counted(shape, later=True)[0] == pytest.approx(11 / 2, rel=0.4)
    assert counted(shape, 256)[0] == pytest.approx(3 * 256 / 6, rel=0.4)


def test_the_parameters_of_the_seed_documents_count_the_lm_head_twice():
    config = model_info("preset:gpt2").config
    assert config.num_parameters == 124_439_808
    assert config.num_parameters + config.vocab_size * config.hidden_size == 163_037_184


def row(label, speed, **more):
    figures = {"median": speed, "mean": speed, "std": 0.0, "trials": [speed, speed]}
    return {
        "label": label,
        "tok_per_s": figures,
        "decode_tok_per_s": figures,
        "ttft_s": figures | {"median": 1 / speed},
        "cold": {"seconds": 100 / speed, "compilations": 3, "compile_s": 10 / speed},
        "tokens": [[1, 2]],
        "seed": "1x",
        "counted": None,
        **more,
    }


def sample(gpt2_speed=20.0):
    """A run's figures, all made up."""
    cold = {
        "model": "preset:x", "output_tokens": 5, "seed": "3.98x", "counted": [9.0, 1.0],
        "old": [row("old method", 2.0)], "new": [row("new method", 8.0)],
        "warm": row("default settings", 9.0),
    }  # fmt: skip
    gpt2 = {
        "no cache, no jit": 1.0, "no cache, jit": 5.0, "default settings": 10.0,
        "int8 weights": gpt2_speed,
    }  # fmt: skip
    ladder = [row(label, 3.0**n) for n, (label, *_) in enumerate(STEPS)]
    point = {"context": 64, "counted": [180.0, 1.6], "off": row("off", 2.0), "on": row("on", 8.0)}
    environment = {
        "date": "2026-01-01T00:00", "rooflax": "0", "jax": "0", "python": "3", "system": "Linux",
        "cpu": "a processor", "threads": 2,
    }  # fmt: skip
    tables = {
        "gpt2": [row(label, speed) for label, speed in gpt2.items()],
        "qwen2.5": [cold],
        "gpt-oss": [*ladder, row("no cache, jit", 27.0)],
        "kv-cache": [point],
    }
    return {"environment": environment, "seconds": 60.0, "tables": tables}


def test_a_missed_total_is_a_failure():
    assert WANTED == {"gpt2": 16.32, "qwen2.5": 3.98, "gpt-oss": 60.0}
    assert failures(sample()) == []
    missed = "gpt2: 16.00x is below the 16.32x that is wanted"
    assert failures(sample(16.0)) == [missed]
    assert missed in markdown(sample(16.0))


@pytest.mark.parametrize("where", ["gpt2", "gpt-oss", "preset:x", "context 64"])
def test_other_tokens_are_a_failure(where):
    found = sample()
    tables = found["tables"]
    changed = {
        "gpt2": tables["gpt2"][1], "gpt-oss": tables["gpt-oss"][-1],
        "preset:x": tables["qwen2.5"][0]["warm"], "context 64": tables["kv-cache"][0]["on"],
    }  # fmt: skip
    changed[where]["tokens"] = [[1, 3]]
    assert failures(found) == [f"{where}: the rows gave different tokens"]


def test_int8_may_have_other_tokens():
    found = sample()
    found["tables"]["gpt2"][-1]["tokens"] = [[7]]
    assert failures(found) == []


def test_the_page_is_a_function_of_the_figures():
    page = markdown(sample())
    assert page == markdown(json.loads(json.dumps(sample())))
    for said in (
        "figures of 2026-01-01",
        "| gpt2 | 16.32x | 20.0x | 2.00x |",
        "| qwen2.5 | 3.98x | 4.00x | 4.50x |",
        "| gpt-oss | 60.0x | 243x | 9.00x |",
        "| + jit | 81.0 ± 0.00 (2) | 3.00x |",
        "9.00x / 1.00x",
        "All float32 rows of a table gave the same tokens.",
    ):
        assert said in page, said
    assert sum(line.startswith("| ---") for line in page.splitlines()) == 5


@pytest.mark.slow
def test_every_table_is_measured(tmp_path):
    """With tiny shapes: what the rows say, not how fast they are."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.founding", "--smoke", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "founding-tables.json").read_text())
    assert [line for line in failures(found) if "tokens" in line] == []
    assert len(found["tables"]["kv-cache"]) == len(SMOKE.contexts)
    assert (tmp_path / "founding-tables.md").read_text() == markdown(found)
