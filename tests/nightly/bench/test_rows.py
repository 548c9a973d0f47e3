"""Longer tests beside those of tests/engine/bench/test_rows.py."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rooflax.bench.ablate import Row, summarise
from rooflax.bench.document import with_cost
from rooflax.bench.quick import quick
from rooflax.bench.worker import measure_apart
from rooflax.errors import RequestError
from rooflax.nn.execution import ExecutionOptions
from rooflax.ops import native
from tests.engine.bench.test_rows import TINY
from tests.support.bench.samples import XLA, measured, row

EXTRA = 1 << 28


@pytest.fixture(scope="module")
def real():
    """A row as it is really measured, in a process of its own."""
    return measure_apart(TINY)


def test_a_row_in_its_own_process_has_its_own_memory(real):
    result = real["result"]
    assert set(result) == set(row(TINY)) | {"ceilings"}
    memory = result["memory"]
    start, peak = memory["anonymous_before_bytes"], memory["anonymous_peak_bytes"]
    assert start + result["weights_bytes"] < peak
    assert result["peak_rss_bytes"] > peak
    assert memory["temporary_bytes"] > 0
    assert result["compilations_while_timed"] == 0
    assert 0 < result["decode_roofline"] < 1
    assert real["environment"]["jax"]


def test_memory_is_the_models_and_not_the_ceilings():
    """The ceilings' buffer and the check of the output count for nothing."""
    script = f"""
import json
import numpy as np
from rooflax.bench import measure
from rooflax.bench.workload import Workload
from tests.support.bench.samples import CEILING

def reader(working_set, dtype):
    buffer = np.ones({EXTRA} // 8)
    return lambda: CEILING if buffer[-1] else None

def check(timelines, work, llm):
    kept.append(np.ones({EXTRA} // 8))

kept = []
measure.ceiling_reader, measure.check_output = reader, check
found = measure.measure(Workload.from_json(json.loads({json.dumps(json.dumps(TINY.as_json()))})))
print(json.dumps([found["peak_rss_bytes"], found["memory"], measure.peak_rss_bytes()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    peak, memory, peak_with_all = json.loads(done.stdout)
    assert peak + EXTRA // 2 < peak_with_all  # freed pages may have been given back meanwhile
    assert memory["anonymous_after_bytes"] < memory["anonymous_peak_bytes"] + EXTRA // 4


def test_deterministic_rows_set_the_flags_and_say_what_they_cost():
    fixed = measure_apart(replace(TINY, deterministic=True))
    assert "deterministic_ops" in fixed["environment"]["xla_flags"]
    cost = with_cost(fixed, measured(TINY))["result"]["deterministic_over_plain"]
    assert cost["low"] < cost["ratio"] < cost["high"]


def test_a_process_says_which_kernels_would_run():
    wanted = "native" if native.is_ready() else "xla"
    assert measure_apart(TINY, "kernels")["result"] == dict.fromkeys(XLA, wanted)
    with pytest.raises(RequestError, match="kernels is 'pallas'"):
        measure_apart(replace(TINY, options=ExecutionOptions(kernels="pallas")), "kernels")


def test_ablation_rows_really_give_the_same_tokens():
    work = replace(TINY, trials=1, output_tokens=48)
    slow = replace(work, options=ExecutionOptions(use_cache=False))
    rows = [Row("without a cache", slow, None), Row("with", work, 0)]
    found = summarise(rows, [measure_apart(r.work)["result"] for r in rows])
    assert all(r["same_tokens"] for r in found)
    assert found[1]["ratio"] == found[1]["total_ratio"] > 3


def test_the_quick_check_passes():
    """`bench --quick`: at least 3x, the same tokens."""
    found = quick()
    assert found.passed, found
