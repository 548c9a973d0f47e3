"""Longer tests beside those of tests/engine/bench/test_tuning.py."""

from benchmarks import block_sizes as tuning
from benchmarks.block_sizes import Work, tune_model
from rooflax.loading.model_info import model_info
from rooflax.nn.execution import Precision
from tests.engine.bench import test_tuning as beside

on_tpu = beside.on_tpu


def test_a_model_is_tuned(on_tpu, monkeypatch):
    """Interpreted, so the figures mean nothing; tokens go on through every candidate's runs."""
    monkeypatch.setattr(tuning, "DECODE_STEPS", 2)
    info = model_info("preset:qwen2.5-tiny")
    found = tune_model(info, Work(2, 20, 5, Precision(kv_dtype="float32", quantize="w8a16")))
    kernels = [(f.program, f.question.kernel) for f in found]
    assert {("decode", "attention.tpu"), ("prefill", "linear.tpu")} <= set(kernels)
    assert all(set(f.seconds) == {f.question.rule, *f.question.others} for f in found)
