"""Beams from text in to text out: what each field does to them, and what they do to neighbours."""

import dataclasses

import jax
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams
from rooflax.errors import RequestError
from rooflax.nn.batch import Batch
from tests import goldens

pytestmark = pytest.mark.oldest_jax

PROMPTS = [[3, 1, 4, 1, 5], list(range(40, 57)), list(range(100, 130))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=4)


def params(**given):
    return SamplingParams(**{"num_beams": 3, "n": 3, "max_tokens": 12, "ignore_eos": True} | given)


def texts(completions):
    return [(c.index, c.tokens) for c in completions]


def scores(completions):
    return [c.score for c in completions]


@jax.jit
def logprobs_after(model, tokens, lengths):
    hidden, _ = model.forward(Batch.dense(tokens, lengths=lengths), None)
    last = hidden[np.arange(tokens.shape[0]), lengths - 1]
    return jax.nn.log_softmax(model.logits(last), axis=-1)


def adjusted(logprobs, prompt, output, given):
    """The definitions of the fields, on log-probabilities."""
    found, counts = logprobs.astype(np.float64), np.bincount(output, minlength=goldens.VOCAB)
    seen = np.union1d(prompt, output).astype(int)
    found[seen] *= given.repetition_penalty or 1.0
    found -= (given.presence_penalty or 0.0) * (counts > 0)
    found -= (given.frequency_penalty or 0.0) * counts
    for token, value in given.logit_bias.items():
        found[token] += value
    banned = set(given.banned_token_ids)
    if given.allowed_token_ids:
        banned |= set(range(goldens.VOCAB)) - set(given.allowed_token_ids)
    if len(output) < given.min_tokens:
        banned |= set(given.stop_token_ids)
    found[list(banned)] = -np.inf
    return found


def search(model, prompt, given):
    """Beam search as one would write it down, with early_stopping and length_penalty 1."""
    beams, done = [(0.0, [])], []
    for length in range(1, given.max_tokens + 1):
        tokens = np.zeros((given.num_beams, 64), np.int32)
        for row, (_, output) in enumerate(beams):
            tokens[row, : len(prompt) + length - 1] = [*prompt, *output]
        lengths = np.full(given.num_beams, len(prompt) + length - 1, np.int32)
        rows = np.asarray(logprobs_after(model, tokens, lengths))
        found = sorted(
            (
                (score + value, [*output, token])
                for (score, output), row in zip(beams, rows, strict=False)
                for token, value in enumerate(adjusted(row, prompt, output, given))
            ),
            key=lambda beam: -beam[0],
        )
        last = length == given.max_tokens
        for score, output in found[: given.num_beams]:
            if last or output[-1] in given.stop_token_ids:
                done.append((score / length, tuple(output)))
        beams = [b for b in found if b[1][-1] not in given.stop_token_ids][: given.num_beams]
        if len(done) >= given.num_beams:
            break
    return sorted(done, reverse=True)[: given.num_beams]


@pytest.mark.parametrize(
    "given",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"allowed_token_ids": list(range(20, 60)), "banned_token_ids": [30, 45]},
        {"logit_bias": {5: 6.0, 6: 5.0}, "presence_penalty": -0.5},
        {"min_tokens": 6},
    ],
    ids=lambda given: "-".join(given),
)
def test_fields_act_on_log_probabilities(llm, given):
    whole = llm.generate([PROMPTS[0]], GREEDY)[0].tokens
    ends = sorted({whole[2], whole[5]} if "min_tokens" in given else {whole[7]})
    asked = params(early_stopping=True, stop_token_ids=ends, **given)
    wanted = search(llm.model, PROMPTS[0], asked)
    found = llm.generate([PROMPTS[0]], asked)
    assert [c.tokens for c in found] == [tokens for _, tokens in wanted]
    np.testing.assert_allclose(scores(found), [score for score, _ in wanted], rtol=0, atol=1e-4)
    without = params(early_stopping=True, stop_token_ids=ends)
    assert texts(llm.generate([PROMPTS[0]], without)) != texts(found)


def test_n_takes_the_best_and_each_comes_once_and_whole(llm):
    all_ = llm.generate([PROMPTS[0]], params())
    assert scores(all_) == sorted(scores(all_), reverse=True)
    deltas = list(llm.stream([PROMPTS[0]], params(n=2)))
    assert [d.completion.tokens for d in deltas] == [c.tokens for c in all_[:2]]
    for delta in deltas:
        assert delta.tokens == delta.completion.tokens and delta.text == delta.completion.text
        assert delta.text == llm.tokenizer.decode(delta.tokens)
        assert delta.completion.timings["decode_tok_per_s"] > 0
    assert llm.generate([PROMPTS[0]], GREEDY)[0].score is None


def test_beams_and_neighbours_do_not_see_each_other(llm):
    asked = [params(), GREEDY, params(n=1, num_beams=2, length_penalty=2.0)]
    together = llm.generate(PROMPTS, asked)
    alone = [c for p, a in zip(PROMPTS, asked, strict=True) for c in llm.generate([p], a)]
    assert texts(together) == texts(alone)
    np.testing.assert_allclose(
        [c.score for c in together if c.score], [c.score for c in alone if c.score], atol=1e-4
    )


def test_more_beams_than_slots_wait_for_each_other(llm):
    asked = params(num_beams=4, n=4)
    together = llm.generate(PROMPTS * 2, asked)
    alone = [c.tokens for p in PROMPTS * 2 for c in llm.generate([p], asked)]
    assert [c.tokens for c in together] == alone


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"options": ExecutionOptions(use_cache=False)}, marks=pytest.mark.nightly),
        {"options": ExecutionOptions(layers="scan"), "prefix_caching": False},
    ],
    ids=["no-cache", "scan"],
)
def test_beams_are_the_same_under_every_switch(llm, folder, given):
    other = LLM(folder, max_num_seqs=4, **given).generate([PROMPTS[1]], params())
    wanted = llm.generate([PROMPTS[1]], params())
    assert texts(other) == texts(wanted)
    np.testing.assert_allclose(scores(other), scores(wanted), rtol=0, atol=1e-4)


def test_a_closed_stream_frees_every_beam(llm):
    stream = llm.stream(PROMPTS[:2], [params(), GREEDY])
    assert next(stream).completion is None
    scheduler = llm._engine.scheduler
    assert len(scheduler.running) == 4
    stream.close()
    assert not scheduler.has_unfinished and not any(scheduler.blocks.num_used)


def test_what_is_not_finite_ends_all_beams_and_nobody_else(folder):
    """Token 200's embedding is NaN."""
    llm = LLM(folder, max_num_seqs=4)
    embed = llm.model.weights["embed"].at[200].set(np.nan)
    llm.model = dataclasses.replace(llm.model, weights=llm.model.weights | {"embed": embed})
    found = llm.generate([[7, 200, 9], PROMPTS[0]], [params(), GREEDY])
    assert [c.finish_reason for c in found] == ["error"] * 3 + ["length"]
    assert all("NaN" in c.error and c.tokens == () and c.score is None for c in found[:3])
    assert found[3].tokens == llm.generate([PROMPTS[0]], GREEDY)[0].tokens
    late = params(logit_bias={200: 100.0}, banned_token_ids=[1])  # a beam takes it, then fails
    assert {c.finish_reason for c in llm.generate([PROMPTS[0]], late)} == {"error"}
    assert not any(llm._engine.scheduler.blocks.num_used)
    assert np.isfinite(np.asarray(jax.tree.leaves(llm._engine.runner.cache.k)[0])).all()


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 5, "n": 1}, "num_beams is 5 and max_num_seqs 4"),
        ({"stop_token_ids": list(range(18))}, "num_beams is 3 and 18 ids end the text"),
        ({"allowed_token_ids": [1, 2, 3], "banned_token_ids": [2]}, "and 2 ids may be chosen"),
        ({"allowed_token_ids": [1, 2, 3], "stop_token_ids": [2]}, "and 2 ids may be chosen"),
    ],
)
def test_searches_that_could_not_run_are_rejected(llm, given, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPTS[0]], params(**given))
