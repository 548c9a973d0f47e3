"""Drafts: who makes them, whether they pay, and that they change no token."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax import LLM, RequestError, SamplingParams, load
from rooflax.engine.engine import Engine
from rooflax.engine.features.speculation import (
    LONGEST_NGRAM,
    LONGEST_REST,
    SHORTEST_NGRAM,
    TRIALS,
    DraftCounts,
    Drafter,
    NgramDrafter,
    Speculation,
)
from rooflax.engine.sequence import Sequence
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions

pytestmark = pytest.mark.oldest_jax

CODE = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def get_x(self):\n        return self.x\n\n    def get_y(self):\n        return self.y\n\n"
    "class Size:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
)


def sequence(tokens):
    return Sequence(0, tokens, SamplingParams(), 100, frozenset())


def by_hand(tokens, count):
    """The longest n-gram at the end that stands before it too, at its last place."""
    for n in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                out, at = list(tokens), start + n
                while len(out) < len(tokens) + count:
                    out.append(out[at])
                    at += 1
                return out[len(tokens) :]
    return []


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=8),
    count=st.integers(1, 9),
)
def test_ngrams_are_found_however_the_text_grew(tokens, cuts, count):
    drafter, seq = NgramDrafter(), sequence(tokens[:1])
    for cut in cuts:
        drafter.propose([seq], count)
        seq.tokens += tokens[seq.num_tokens : seq.num_tokens + cut]
    seq.tokens += tokens[seq.num_tokens :]
    assert drafter.propose([seq], count) == [by_hand(tokens, count)]


class Guess(Drafter):
    def propose(self, sequences, num_tokens):
        return [[0] * num_tokens for _ in sequences]


def play(speculation, *, share, verify_s, steps):
    """Steps of one row of a model whose decode step takes a second; how many had drafts."""
    verified, seq = 0, [sequence([1])]
    for _ in range(steps):
        drafts = speculation.propose(seq, 7)
        if drafts:
            held = round(share * len(drafts[0]))
            speculation.verified(1, len(drafts[0]), held, verify_s)
            verified += 1
        else:
            speculation.decoded(1, 1, 1.0)
    return verified


def test_drafts_that_hold_are_always_made():
    assert play(Speculation(Guess()), share=1.0, verify_s=2.0, steps=1000) == 999


@pytest.mark.parametrize(("share", "verify_s"), [(0.0, 1.1), (1.0, 9.0), (0.3, 4.0)])
def test_drafts_that_do_not_pay_are_tried_ever_more_seldom(share, verify_s):
    speculation = Speculation(Guess())
    first = play(speculation, share=share, verify_s=verify_s, steps=1000)
    assert TRIALS <= first < 40
    play(speculation, share=share, verify_s=verify_s, steps=2000)
    assert play(speculation, share=share, verify_s=verify_s, steps=LONGEST_REST) <= 2 * TRIALS


def test_drafts_come_back_when_they_begin_to_hold():
    speculation = Speculation(Guess())
    play(speculation, share=0.0, verify_s=2.0, steps=200)
    assert play(speculation, share=1.0, verify_s=2.0, steps=2000) > 1000


def params(**given):
    return SamplingParams(**({"max_tokens": 48, "temperature": 0.0} | given))


@pytest.fixture(scope="module")
def plain():
    return LLM()


@pytest.fixture(scope="module")
def drafting():
    return LLM(speculate="ngram")


@pytest.fixture
def unhesitating(monkeypatch):
    monkeypatch.setattr(Speculation, "_is_worthwhile", lambda self, rows, num_drafts: True)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.7, "seed": 3},
        pytest.param(
            {"temperature": 0.9, "seed": 1, "top_k": 20, "top_p": 0.9}, marks=pytest.mark.nightly
        ),
        {"repetition_penalty": 1.2},
        pytest.param(
            {"presence_penalty": 0.4, "frequency_penalty": 0.3}, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"temperature": 0.5, "frequency_penalty": 0.2, "n": 3}, marks=pytest.mark.nightly
        ),
        {"logprobs": 3, "min_tokens": 20, "stop": ("return",)},
        {"logit_bias": {30: 5.0}, "banned_token_ids": (40, 41)},
        {"max_tokens": 1},
        {"max_tokens": 2},
    ],
    ids=str,
)
def test_ngrams_change_no_token(plain, drafting, unhesitating, given):
    wanted = plain.generate([CODE, CODE[:90]], params(**given))
    found = drafting.generate([CODE, CODE[:90]], params(**given))
    for one, other in zip(wanted, found, strict=True):
        assert other.tokens == one.tokens
        assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
        assert (other.logprobs is None) == (one.logprobs is None)
        for mine, theirs in zip(other.logprobs or (), one.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]
    assert all(c.num_draft_tokens == 0 for c in wanted)
    if given.get("max_tokens", 48) > 2:
        assert sum(c.num_draft_tokens for c in found) > 0
        if "repetition_penalty" not in given:
            assert sum(c.num_accepted_tokens for c in found) > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"jit": False}, marks=pytest.mark.nightly),
        pytest.param({"layers": "unrolled"}, marks=pytest.mark.nightly),
        pytest.param({"kernels": "xla"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_ngrams_change_no_token_with_other_options(plain, unhesitating, options):
    drafting = LLM(speculate="ngram", num_draft_tokens=3, options=ExecutionOptions(**options))
    wanted = plain.generate(CODE, params(max_tokens=24))[0]
    found = drafting.generate(CODE, params(max_tokens=24))[0]
    assert found.tokens == wanted.tokens
    assert found.num_draft_tokens > 0


@pytest.mark.every_jax
def test_what_cannot_draft_is_rejected():
    with pytest.raises(RequestError, match="num_draft_tokens is 0"):
        LLM(speculate="ngram", num_draft_tokens=0)
    with pytest.raises(RequestError, match="num_draft_tokens is given without speculate"):
        LLM(num_draft_tokens=3)
    with pytest.raises(RequestError, match="needs the cache"):
        LLM(speculate="ngram", options=ExecutionOptions(use_cache=False))


class Poisoned(Drafter):
    """Proposes a token that nothing finite can be computed from."""

    def propose(self, sequences, num_tokens):
        return [[7] * num_tokens for _ in sequences]


@pytest.mark.every_jax
@pytest.mark.parametrize("kernels", [pytest.param("xla", marks=pytest.mark.nightly), None])
def test_a_draft_that_is_not_finite_leaves_nothing_behind(unhesitating, kernels):
    """Its sequence starts over without drafts, and gives what it gives alone."""
    model = load("preset:gpt-oss-tiny")  # its head is another matrix
    table = model.weights["embed"]
    poisoned = replace(model, weights=model.weights | {"embed": table.at[7].set(jnp.nan)})
    tokens = []
    for speculation in (None, Speculation(Poisoned())):
        engine = Engine(
            poisoned,
            EngineConfig(
                options=ExecutionOptions(kernels=kernels), max_num_seqs=2, max_model_len=64
            ),
            speculation,
        )
        banned = SamplingParams(temperature=0.0, banned_token_ids=(7,)).with_defaults({})
        sequences = [Sequence(i, [5, 9 + i], banned, 20, frozenset()) for i in range(2)]
        engine.add(sequences)
        while engine.has_unfinished:
            engine.step()
        tokens.append([s.output_tokens for s in sequences])
        assert [s.finish_reason for s in sequences] == ["length", "length"]
    assert (
        sequences[0].features[DraftCounts].num_draft_tokens > 0
        and sequences[0].schedule.num_preemptions == 1
    )
    assert tokens[0] == tokens[1]
