"""`bench --concurrent` and `--request-rate` as users run them; on a real preset in nightly."""

import itertools
import json

import pytest

from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

SHORT = ("--prompt-tokens", 9, "--output-tokens", 5)


PRESETS = ("preset:gpt2-tiny", "preset:gpt2")


@pytest.mark.parametrize(
    ("preset", "dtype"),
    cases(itertools.product(PRESETS, ["int8", "float32"]), default=[("preset:gpt2-tiny", "int8")]),
)
def test_requests_at_once_give_the_tokens_of_each_alone(rooflax, preset, dtype):
    """The command compares the tokens itself; it ends with 1 only for a figure below its target."""
    format = ("-q", dtype) if dtype == "int8" else ()
    ran = rooflax("bench", preset, *format, "--concurrent", "--trials", 1, *SHORT, "--json")
    assert ran.code in (0, 1), ran.err
    found = json.loads(ran.out)
    assert found["passed"] == (ran.code == 0)
    assert found["speedup"] == found["together_tok_per_s"] / found["alone_tok_per_s"]
    assert found["share"] == found["together_tok_per_s"] / found["parts_tok_per_s"]


@pytest.mark.every_jax
@pytest.mark.parametrize("preset", cases(PRESETS, nightly=["preset:gpt2"]))
def test_requests_at_a_rate_all_end(rooflax, preset):
    ran = rooflax("bench", preset, "--request-rate", 20, "--requests", 4, *SHORT, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["metrics"]["num_finished"] == {"length": 4}
    assert found["metrics"]["num_generated_tokens"] == 4 * 5
    assert found["metrics"]["num_compilations"] == 0


def test_the_embedded_model_is_served_with_the_prefix_that_its_context_holds(rooflax):
    ran = rooflax("bench", "-q", "int8", "--concurrent", "--trials", 1, *SHORT, "--json")
    assert ran.code in (0, 1), ran.err
    assert json.loads(ran.out)["prefix_tokens"] == 448
