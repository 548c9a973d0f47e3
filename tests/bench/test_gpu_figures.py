"""The script that takes a GPU's figures: it works without one, and says what failed."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

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
    return json.loads((out / "figures.json").read_text()), (out / "table.md").read_text()


def test_parts_are_written_down_one_after_the_other(tmp_path):
    figures, table = run(tmp_path, "--only", "ceilings")
    assert figures["ceilings"]["result"]["read_gb_per_s"] > 0 and "Ceilings:" in table
    both, table = run(tmp_path, "--only", "decode int8", "--budget", "0")
    assert both["ceilings"] == figures["ceilings"]  # kept
    assert both["decode int8"]["failed"] == "no time was left" and "no time was left" in table


def test_a_model_with_weights_drawn_on_the_device_is_measured(tmp_path):
    figures, _ = run(tmp_path, "--only", "decode int8")
    assert "failed" not in figures["decode int8"], figures["decode int8"]["said"]


def test_a_part_that_fails_or_takes_too_long_says_so(script):
    row = {"model": "preset:nothing", "work": {}, "precision": {}}
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    failed = script.run_part(script.Part("row", "model", row, 60), 60, environment)
    assert "no preset 'nothing'" in failed["failed"]
    late = script.run_part(script.Part("row", "model", row, 60), 0.1, environment)
    assert late["failed"].startswith("not done after")


def test_only_names_a_part(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "none of the parts: kernels, ceilings" in done.stderr


@pytest.mark.parametrize(
    "format", cases(["w8a16", "w4a16", "mxfp4-a16", "fp8-a16"], slow=["w8a16"])
)
def test_packed_weights_drawn_on_the_device_spread_as_a_preset_does(script, format):
    w = script._one(jax.random.key(0), "packed", ((), (256,), (64,)), format, 0.02)
    numbers = np.asarray(w.numbers())
    assert 0.015 < numbers.std() < 0.027 and abs(numbers.mean()) < 0.003
    if format == "w8a16":
        codes = numbers / np.asarray(w.scales)[:64]
        np.testing.assert_allclose(codes.sum(axis=0), np.asarray(w.sums)[:64], atol=0.1)


def test_models_of_every_part_are_presets(script):
    from rooflax.models.presets import PRESETS

    for part in script.parts(tiny=False):
        name = part.arguments.get("model", "preset:llama-3.1-8b").removeprefix("preset:")
        assert name in PRESETS, part


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path):
    figures, _ = run(tmp_path)
    allowed = {"transformers"} | (set() if jax.__version_info__ >= OLDEST_GPU_JAX else {"kernels"})
    failed = {name: found["failed"] for name, found in figures.items() if "failed" in found}
    assert set(failed) <= allowed, failed
    if "kernels" not in failed:
        assert figures["kernels"]["result"]["wrong"] == []
