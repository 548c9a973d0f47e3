"""Longer tests beside those of tests/engine/bench/test_gpu_figures.py."""

import jax

from benchmarks import gpu_list
from rooflax.ops.accelerator import OLDEST_GPU_JAX
from tests.engine.bench.test_gpu_figures import run


# 48 s of processor time, of a tool of the docs
def test_the_whole_dry_run(tmp_path):
    """Every case has a result: where there are no kernels from XLA, and its line says so."""
    lines, table = run(tmp_path)
    last = {line["name"]: line for line in lines}
    assert list(last) == [case.name for case in gpu_list.cases(tiny=True)]
    kernels = jax.__version_info__ >= OLDEST_GPU_JAX
    for case in gpu_list.cases(tiny=True):
        line = last[case.name]
        assert f"| {case.name}" in table
        if ("race" in case.job or case.job == "step") and not kernels:
            assert "need JAX 0.11" in line["failed"]
            continue
        assert "result" in line, line
        falls_back = not kernels and case.job in ("linear", "attention", "experts")
        assert ("fell_back" in line) == falls_back, line
        result = line["result"]
        if case.job in ("linear", "attention", "experts"):
            assert result["error"] <= result["tolerance"] and result["seconds"] > 0
        if case.job in ("model", *gpu_list.PEERS):
            shares = [
                result[f"{kind}_{of}"] for kind in ("decode", "prefill") for of in ("mbu", "mfu")
            ]
            assert all(share > 0 for share in shares)
        if case.job == "model":
            assert result["prefill_chunk"] == case.arguments.get("chunk", result["prefill_chunk"])
    assert last["ceilings"]["result"]["read_gb_per_s"] > 0
    assert ("(XLA: the kernel failed)" in table) != kernels
    assert "| decode llama-3.1-8b int4 | decode |" in table
    flags = last["command buffers for loops, int4, 4 layers"]["environment"]["xla_flags"]
    assert flags.endswith("+WHILE,+CONDITIONAL")
    assert any((tmp_path / "cache").glob("*-cache"))
