"""Decode steps beside constrained rows: how many tokens a dispatch gives changes, never which."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams
from rooflax.engine.features.grammar import Constrained, MaskReuse, constrain
from rooflax.engine.runner import Runner
from rooflax.engine.sequence import Sequence
from rooflax.ops import native
from rooflax.ops.sampling import TokenCounts
from rooflax.ops.sampling_columns import NO_ID

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["class Reader:\n", "def read(path):", "import os\n", "x = "]


def constrained(**given):
    return SamplingParams(max_tokens=24, seed=3, json_schema=json.dumps(SCHEMA), **given)


def free(**given):
    return SamplingParams(max_tokens=24, seed=3, ignore_eos=True, **given)


@pytest.fixture(scope="module", params=["native", "xla"])
def kernels(request):
    """With masks made while steps run, and with those of the first step reused."""
    if request.param == "native" and not native.is_ready():
        pytest.skip("the native library was not built")
    return request.param


@pytest.fixture(scope="module")
def single(kernels):
    return LLM(options=ExecutionOptions(decode_steps=1, kernels=kernels))


@pytest.fixture(scope="module")
def several(kernels):
    return LLM(options=ExecutionOptions(decode_steps=8, kernels=kernels))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0, "repetition_penalty": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 2},
    ],
    ids=["greedy", "repetition", "presence, frequency and logprobs"],
)
def test_tokens_are_those_of_single_steps(single, several, monkeypatch, given):
    steps, exchanges = [], []
    dispatch = Runner._dispatch

    def counting(self, call, num_steps=1, masks=None, exchange=0):
        if call.sequences:
            steps.append(num_steps)
        result = dispatch(self, call, num_steps, masks, exchange)
        exchanges.append(exchange > 0)
        return result

    monkeypatch.setattr(MaskReuse, "num_steps", lambda self, sequences, most: most)
    monkeypatch.setattr(Runner, "_dispatch", counting)
    params = [constrained(**given), free(**given), constrained(**given), free(**given)]
    wanted = single.generate(PROMPTS, params)
    assert max(steps) == 1
    steps.clear()
    found = several.generate(PROMPTS, params)
    assert max(steps) == 8 and any(exchanges) == (several.options.kernels == "native")
    for a, b in zip(wanted, found, strict=True):
        assert (a.tokens, a.text, a.finish_reason, a.logprobs) == (
            b.tokens, b.text, b.finish_reason, b.logprobs,
        )  # fmt: skip


def test_what_was_counted_last_is_taken_back():
    counts = TokenCounts(
        jnp.zeros((3, 6), bool), jnp.zeros((3, 6), jnp.int32), jnp.full((3, 4), NO_ID, jnp.int32)
    )
    slots, tokens = jnp.array([2, 0]), jnp.array([[1, 2, 1, NO_ID], [5, 4, 3, 3]])
    for step in range(4):
        counts = counts.add_generated(
            slots, jnp.maximum(tokens[:, step], 0), tokens[:, step] != NO_ID
        )
    counts = counts.keep_latest(slots, tokens)
    found = counts.take_back(slots, jnp.array([2, 3])).generated
    np.testing.assert_array_equal(found[0], [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(found[1], np.zeros(6))
    np.testing.assert_array_equal(found[2], [0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        counts.take_back(slots, jnp.array([0, 0])).generated, counts.generated
    )


def sequence(constraint, stays=0.5):
    params = SamplingParams(max_tokens=9)
    found = Sequence(0, [1], params, 9, frozenset())
    if constraint is not None:
        constrain(found, constraint)
        found.features[Constrained].mask_stays = stays
    return found


def test_more_steps_where_masks_stay_and_dispatches_cost():
    reuse = MaskReuse()
    for _ in range(40):
        reuse.observe(0.001, 1, 0.0015)
        reuse.observe(0.001, 3, 0.0035)
    chosen = [reuse.num_steps([sequence(object(), p)] * 8, 32) for p in (0.0, 0.5, 0.9, 1.0)]
    assert chosen[0] == 1 and chosen == sorted(chosen) and 2 < chosen[2] < 10 and chosen[3] == 32
    beside = [sequence(None), sequence(None), sequence(object(), 0.5)]
    assert reuse.num_steps(beside, 32) > 8
    for _ in range(40):  # a large model: a dispatch costs nothing beside a step
        reuse.observe(0.0001, 1, 0.0201)
        reuse.observe(0.0001, 3, 0.0601)
    assert reuse.num_steps([sequence(object(), 0.9)] * 8, 32) == 1
