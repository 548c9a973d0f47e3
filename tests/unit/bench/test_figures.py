"""Summaries, doubts, and verdicts that are given only where they are deserved."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax.bench.figures import Summary, doubts, paired_ratio, unpaired_ratio
from rooflax.errors import RequestError


def test_summary_by_hand():
    summary = Summary.of([1, 2, 6])
    assert (summary.mean, summary.min, summary.max, summary.median) == (3, 1, 6, 2)
    assert summary.std == pytest.approx(7**0.5)
    assert summary.as_json()["trials"] == [1.0, 2.0, 6.0]
    assert Summary.of([5]).std == 0


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([100, 101, 99, 100, 100], []),
        ([140, 60, 100, 100, 60, 140], ["trials deviate by 36%"]),
        ([80, 100, 101, 100, 100, 100], ["the first trial is 20% slower"]),
        ([100, 99, 101, 88, 87, 88], ["speed drifts by -12%"]),
    ],
)
def test_doubts_are_named(trials, words):
    found = doubts(Summary.of(trials))
    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@given(st.integers(0, 1000), st.sampled_from([0.5, 0.9, 1.2, 3.0]))
@settings(max_examples=30, deadline=None)
def test_a_large_difference_is_found_whatever_the_machine_does(seed, factor):
    """The noise of a pair is common to both sides, so it falls out of the ratio."""
    rng = np.random.default_rng(seed)
    machine = np.exp(rng.normal(0, 0.3, 10))
    a, b = machine * np.exp(rng.normal(0, 0.01, 10)), machine * factor
    ratio = paired_ratio(a, b)
    assert ratio.low < ratio.ratio < ratio.high
    assert ratio.verdict == ("faster" if factor > 1 else "slower")


@pytest.mark.parametrize("compare", [paired_ratio, unpaired_ratio])
@pytest.mark.parametrize("trials", [5, 8, 20])
def test_equal_sides_seldom_get_a_verdict(compare, trials):
    rng = np.random.default_rng(3)
    sides = np.exp(rng.normal(0, 0.05, (400, 2, trials)))
    wrong = sum(compare(a, b).verdict != "no difference shown" for a, b in sides)
    assert wrong <= 0.03 * 400  # nominally 1%; a bootstrap of five pairs comes to 2%


def test_too_few_trials_are_rejected():
    with pytest.raises(RequestError, match="at least 5 trials"):
        paired_ratio([1, 2, 3], [1, 2, 3])
