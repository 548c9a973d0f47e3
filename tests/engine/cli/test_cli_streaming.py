"""`--weights-budget`: what `inspect` announces and `generate` says of it."""

import json

import pytest

from rooflax.loading.plan import make_plan
from tests.sharding import write_checkpoint

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("streaming"), "llama")


@pytest.fixture(scope="module")
def budget(where):
    """Room for one layer that stays and two on their way."""
    plan = make_plan(where, weights_budget=1 << 40).offloading
    return plan.fixed_bytes + 3 * max(plan.layer_bytes)


def test_inspect_and_generate_say_what_is_offloaded(rooflax, where, budget):
    ran = rooflax("inspect", where, "--weights-budget", budget, "--json")
    memory = json.loads(ran.out)["memory"]
    layer = memory["offloading"].pop("bytes_per_step") // 3
    assert memory["offloading"] == {
        "budget_bytes": budget, "layers": 4, "layers_resident": 1, "layers_offloaded": 3,
    }  # fmt: skip
    assert budget - layer < memory["weights_bytes"] <= budget
    text = rooflax("inspect", where, "--weights-budget", budget).out
    assert "layers that are offloaded" in text
    assert max(map(len, text.splitlines())) <= 80

    flags = ("generate", where, "-p", "def f", "-n", 6, "--temp", 0, "--ignore-eos")
    plain = json.loads(rooflax(*flags, "--json").out)
    found = json.loads(rooflax(*flags, "--weights-budget", budget, "--json").out)
    assert found["tokens"] == plain["tokens"]
    assert "offloading" not in plain
    streaming = found["offloading"]
    assert streaming.pop("gb_per_s") > 0
    assert streaming == {
        "layers": 4, "layers_offloaded": 3, "bytes_per_step": 3 * layer, "steps": 6,
        "bytes_per_token": 3 * layer,
    }  # fmt: skip
    assert found["memory"]["weights_bytes"] <= budget < plain["memory"]["weights_bytes"]
    said = rooflax(*flags, "--weights-budget", budget).err
    assert "offload  3 of 4 layers, " in said
    assert " GB/s\n" in said


@pytest.mark.parametrize("flags", [("--mesh", "tensor=2"), ("--no-jit",), ("--layers", "scan")])
def test_flags_that_do_not_go_together_are_one_sentence(rooflax, where, flags):
    ran = rooflax("generate", where, "-p", "x", "--weights-budget", "1MB", *flags)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "weights budget" in ran.err
