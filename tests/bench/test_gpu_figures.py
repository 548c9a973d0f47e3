"""The script that takes a GPU's figures: it works without one, and says what failed."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import gpu_models
from rooflax.ops.accelerator import OLDEST_GPU_JAX
from tests.marks import cases
from tests.product.snippets import ROOT

pytestmark = pytest.mark.oldest_jax

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(out, *arguments):
    command = [sys.executable, str(SCRIPT), str(out), "--dry-run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    return lines, (out / "table.md").read_text()


def test_the_whole_dry_run(tmp_path, script):
    """Every case has a result: where there are no kernels from XLA, and its line says so."""
    lines, table = run(tmp_path)
    last = {line["name"]: line for line in lines}
    assert list(last) == [case.name for case in script.cases(tiny=True)]
    kernels = jax.__version_info__ >= OLDEST_GPU_JAX
    for case in script.cases(tiny=True):
        line = last[case.name]
        assert f"| {case.name}" in table
        if ("race" in case.job or case.job == "step") and not kernels:
            assert "need JAX 0.11" in line["failed"]
            continue
        assert "result" in line, line
        falls_back = not kernels and case.job in ("linear", "attention", "experts")
        assert ("fell_back" in line) == falls_back, line
        if case.job in ("linear", "attention", "experts"):
            assert line["result"]["error"] <= line["result"]["tolerance"]
    assert last["ceilings"]["result"]["copy_gb_per_s"] > 0
    assert ("(XLA: the kernel failed)" in table) != kernels


def test_what_is_not_begun_in_time_says_so(tmp_path):
    lines, table = run(tmp_path, "--only", "ceilings", "--budget", "0")
    assert lines[0]["failed"] == "no time was left" and "no time was left" in table


def test_a_case_that_fails_or_takes_too_long_says_so(script):
    own = dict(os.environ, JAX_PLATFORMS="cpu")
    row = {"model": "nothing", "work": {}, "precision": {}}
    (failed,) = script.started([script.Case("row", 2, "model", row, 60)], 60, own)
    assert "no preset 'nothing'" in failed["failed"]
    (late,) = script.started([script.Case("row", 2, "model", row, 60)], 0.1, own)
    assert late["failed"].startswith("not done after")


def test_cases_of_a_process_have_lines_of_their_own(script):
    own = dict(os.environ, JAX_PLATFORMS="cpu")
    cases = [script.Case("ceilings", 2, "ceilings", {"tiny": True}, 60)]
    cases.append(script.Case("broken", 2, "nothing of that name", {}, 60))
    first, second = script.started(cases, 60, own)
    assert "result" in first and "KeyError" in second["failed"]


def test_only_names_a_case(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "none of the cases: linear" in done.stderr


@pytest.mark.parametrize(
    "format", cases(["w8a16", "w4a16", "mxfp4-a16", "fp8-a16"], slow=["w8a16"])
)
def test_packed_weights_drawn_on_the_device_spread_as_a_preset_does(script, format):
    w = gpu_models._one(jax.random.key(0), "packed", ((), (256,), (64,)), format, 0.02)
    numbers = np.asarray(w.numbers())
    assert 0.015 < numbers.std() < 0.027 and abs(numbers.mean()) < 0.003
    if format == "w8a16":
        codes = numbers / np.asarray(w.scales)[:64]
        np.testing.assert_allclose(codes.sum(axis=0), np.asarray(w.sums)[:64], atol=0.1)


def test_parts_have_presets_limits_and_names_of_their_own(script):
    from rooflax.models.presets import PRESETS

    known = script.cases(tiny=False)
    assert len({case.name for case in known}) == len(known)
    assert {case.part for case in known} == set(script.BUDGETS_S)
    for case in known:
        assert case.limit_s <= script.BUDGETS_S[case.part]
        assert case.arguments.get("model", "llama-3.1-8b") in PRESETS, case


@pytest.mark.parametrize("bits", [8, 4])
def test_the_torch_peer_multiplies_by_its_codes(bits):
    """Exactly, where weights are codes; and step by step it gives what a whole prompt gives."""
    torch = pytest.importorskip("torch")
    from benchmarks import gpu_torch

    rng, (inner, outer) = np.random.default_rng(0), (64, 32)
    codes = rng.integers(-127, 128, (outer, inner)) if bits == 8 else rng.integers(0, 16, (32, 64))
    codes[:, 0] = 127 if bits == 8 else 0
    codes[:, 32], codes[:, 1], codes[:, 33] = (127, 127, 127) if bits == 8 else (0, 15, 15)
    w = torch.tensor(codes * 0.25, dtype=torch.float32)
    x = torch.tensor(rng.standard_normal((3, inner)), dtype=torch.float32)
    torch.testing.assert_close(gpu_torch.LINEAR[bits](w)(x), x @ w.T, rtol=1e-5, atol=1e-4)

    raw = {**gpu_models.TINY_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    with torch.inference_mode():
        net = gpu_torch.Llama(raw, gpu_torch.LINEAR[bits], 8, "cpu", torch.float32)
        tokens = torch.arange(8)[None] * 7
        whole = net(tokens, torch.arange(8))
        net.cache.zero_()
        net(tokens[:, :6], torch.arange(6))
        for at in (6, 7):
            step = net(tokens[:, at : at + 1], torch.tensor([at]))
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-4)
