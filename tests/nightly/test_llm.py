"""Longer tests beside those of tests/engine/test_llm.py."""

import numpy as np

from rooflax import LLM, ExecutionOptions
from tests.engine import test_llm as beside
from tests.engine.test_llm import PROMPTS, SAMPLED, params

llm = beside.llm


def test_n_samples_are_adjacent_differ_and_start_as_one_sample_does(llm):
    found = llm.generate(PROMPTS[:2], params(n=3, seed=1, **SAMPLED))
    assert [c.index for c in found] == [0, 1, 2, 0, 1, 2]
    assert len({c.tokens for c in found[:3]}) == 3
    one = llm.generate(PROMPTS[:2], params(seed=1, **SAMPLED))
    assert [c.tokens for c in found[::3]] == [c.tokens for c in one]
    greedy = llm.generate([PROMPTS[0]], params(n=2))
    assert greedy[0].tokens == greedy[1].tokens


def test_more_requests_than_slots(folder):
    small = LLM(folder, max_num_seqs=2)
    few = params(max_tokens=6)
    got = small.generate(PROMPTS, few)
    alone = [small.generate([prompt], few)[0].tokens for prompt in PROMPTS]
    assert [c.tokens for c in got] == alone


def test_score_of_prompts_of_any_length(llm):
    """A prompt's scores do not depend on its padding, and one token has none."""
    ids = [int(t) for t in np.random.RandomState(3).randint(0, 263, 131)]
    whole = llm.score([ids])[0]
    assert whole.shape == (130,) and (whole < 0).all()
    for length in (1, 2, 16, 17):
        np.testing.assert_allclose(
            llm.score([ids[:length]])[0], whole[: length - 1], rtol=0, atol=1e-4
        )
    assert llm.score("the")[0].shape == (len(llm.encode("the")) - 1,)


def test_an_fp8_cache_takes_the_bytes_of_an_int8_one(folder):
    """By either of its names; native kernels and XLA's read the same numbers."""
    models = [
        LLM(folder, kv_dtype="float8_e4m3fn"),
        LLM(folder, kv_dtype="fp8", options=ExecutionOptions(kernels="xla")),
        LLM(folder, kv_dtype="int8"),
        LLM(folder),
    ]
    tokens = [llm.generate([[1, 2, 3]], params())[0].tokens for llm in models]
    assert models[0].plan.precision == models[1].plan.precision and tokens[0] == tokens[1]
    assert models[0].kv_cache_bytes == models[2].kv_cache_bytes < models[3].kv_cache_bytes
