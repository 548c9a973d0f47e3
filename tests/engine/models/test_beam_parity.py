"""Beam search equals transformers': the same texts with the same scores, in the same order."""

import numpy as np
import pytest

from rooflax import SamplingParams
from tests import goldens
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

TOLERANCE = 1e-4


def requests(variant):
    """(prompt, params) of every setting, for one batch of all."""
    texts = goldens.committed(variant).greedy.tolist()
    return [
        (prompt, params(setting, goldens.ends(text, setting)))
        for prompt, text in zip(goldens.prompts(), texts, strict=True)
        for setting in goldens.BEAM_SETTINGS
    ]


def params(setting, end_ids, **more):
    given = {k: v for k, v in setting.items() if k != "num_ends"} | more
    return SamplingParams(
        n=setting["num_beams"],
        max_tokens=goldens.BEAM_TOKENS,
        stop_token_ids=end_ids,
        ignore_eos=True,
        **given,
    )


def assert_equal(completions, wanted):
    assert [c.tokens for c in completions] == [tokens for tokens, _ in wanted]
    scores = [c.score for c in completions]
    np.testing.assert_allclose(scores, [s for _, s in wanted], rtol=0, atol=TOLERANCE)
    assert [c.index for c in completions] == list(range(len(wanted)))


@pytest.fixture(scope="module")
def wanted():
    """variant -> per request its beams."""
    return lambda variant: [beams for row in goldens.committed_beams(variant) for beams in row]


@pytest.mark.parametrize("variant", cases(goldens.BEAM_VARIANTS, default=["lfm2"]))
def test_beams_and_scores_equal_transformers(case, wanted, variant):
    prompts, settings = zip(*requests(variant), strict=True)
    completions = iter(case(variant).llm().generate(list(prompts), list(settings)))
    for given, beams in zip(settings, wanted(variant), strict=True):
        found = [next(completions) for _ in beams]
        assert_equal(found, beams)
        reasons = ["stop" if t[-1] in given.stop_token_ids else "length" for t, _ in beams]
        assert [c.finish_reason for c in found] == reasons
    assert next(completions, None) is None


@pytest.mark.parametrize("variant", cases(goldens.BEAM_VARIANTS, default=["lfm2"]))
def test_the_settings_end_beams_at_many_lengths(wanted, variant):
    lengths = [{len(tokens) for tokens, _ in beams} for beams in wanted(variant)]
    assert sum(len(each) > 1 for each in lengths) >= 6
    assert len(set().union(*lengths)) >= 5


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", cases(goldens.BEAM_VARIANTS, default=()))
def test_committed_beams_are_what_transformers_says(wanted, variant):
    now = [beams for row in goldens.live_beams(variant) for beams in row]
    for old, new in zip(wanted(variant), now, strict=True):
        assert [tokens for tokens, _ in old] == [tokens for tokens, _ in new]
        np.testing.assert_allclose([s for _, s in old], [s for _, s in new], rtol=0, atol=TOLERANCE)
