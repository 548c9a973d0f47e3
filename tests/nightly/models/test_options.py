"""Longer tests beside those of tests/engine/models/test_options.py."""

import itertools
import shutil
import time

import numpy as np
import pytest

import rooflax
from rooflax import LLM, ExecutionOptions, SamplingParams
from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.registry import read_config
from tests import goldens
from tests.engine.models import test_options as beside
from tests.engine.models.test_options import FAMILIES, GREEDY, SWITCHES, check, name_of, pairs

mesh = beside.mesh
tiny = beside.tiny


@pytest.mark.parametrize("variant", list(FAMILIES.values()))
@pytest.mark.parametrize("values", list(itertools.product(*SWITCHES.values())), ids=str)
def test_the_product_of_all_switches_leaves_the_tokens_unchanged(case, variant, values):
    check(case, variant, **dict(zip(SWITCHES, values, strict=True)))


@pytest.mark.parametrize("setting", pairs(), ids=name_of)
def test_pairs_of_switches_leave_latent_attention_unchanged(case, setting):
    check(case, "deepseek_v3", **setting)


# times mean something on a quiet machine only
def test_cached_is_at_least_three_times_faster_than_uncached(tiny):
    """64 tokens after a prompt of 180, on the same model; the better of three runs each."""
    prompt = np.random.RandomState(0).randint(0, 4096, 180).tolist()
    seconds = {}
    for use_cache in (True, False):
        llm = LLM(
            "preset:gpt2-tiny", max_model_len=256, options=ExecutionOptions(use_cache=use_cache)
        )
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        tokens = llm.generate([prompt], params)[0].tokens
        times = []
        for _ in range(3):
            started = time.perf_counter()
            assert llm.generate([prompt], params)[0].tokens == tokens
            times.append(time.perf_counter() - started)
        seconds[use_cache] = min(times)
    assert seconds[False] / seconds[True] >= 3, seconds


def test_kv_heads_are_copied_where_there_are_more_shards(case, mesh, tmp_path):
    """One K/V head on two devices: each has it whole, and half of its query heads."""
    raw = goldens.VARIANTS["llama_bias"] | {"num_key_value_heads": 1}
    name, config = read_config(raw)
    folder = tmp_path / "mqa"
    rooflax.save(build(name, config, random_weights(name, config), None), folder, dtype="float32")
    for path in case("llama_bias").folder.glob("tokenizer*"):
        shutil.copy(path, folder)
    one, two = LLM(folder), LLM(folder, mesh=mesh)
    assert two.model.config.num_kv_heads == 2
    prompts = goldens.prompts()
    assert [c.tokens for c in two.generate(prompts, GREEDY)] == [
        c.tokens for c in one.generate(prompts, GREEDY)
    ]
    np.testing.assert_allclose(two.score(prompts[:1])[0], one.score(prompts[:1])[0], atol=1e-5)
