"""What is compiled when: all that a request needs, before it runs, and in nobody's times."""

import time

import numpy as np
import pytest

from rooflax import LLM, SamplingParams
from rooflax.engine.compilation import CompileCounts, count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.runner import Runner

PAUSE_S = 0.5


@pytest.fixture(scope="module")
def loaded():
    return LLM("preset:gpt2-tiny", max_num_seqs=4)


@pytest.fixture
def llm(loaded, monkeypatch):
    """Without an engine, and as if the cache on disk had all programs."""
    monkeypatch.setattr(CompileCounts, "compilations", property(lambda counts: 0))
    loaded._engine = None
    return loaded


@pytest.fixture
def slow_decode(monkeypatch):
    """Late warm-ups take a while; how many there were."""
    before, calls = Engine.warm_up_decode, []

    def slow(self):
        calls.append(self)
        time.sleep(PAUSE_S)
        before(self)

    monkeypatch.setattr(Engine, "warm_up_decode", slow)
    return calls


@pytest.fixture
def ran(monkeypatch):
    """Shapes that ran, without compiling anything while they did."""
    before, shapes = Runner.run, []

    def checked(self, call, num_steps):
        shapes.append(call.shape)
        with count_compilations() as counts:
            result = before(self, call, num_steps)
        assert counts.requests == 0, f"{call.shape} compiles in a request's time"
        return result

    monkeypatch.setattr(Runner, "run", checked)
    return shapes


def ids(count, seed=0):
    return np.random.RandomState(seed).randint(0, 4096, count).tolist()


def params(max_tokens=4, **given):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **given)


@pytest.mark.parametrize(
    "lengths",
    [[1], [7], [513], [1, 40], [600, 3, 1], [1] * 3 + [20] * 5, [30] * 9, [16, 17]],
    ids=str,
)
def test_every_shape_is_warm_before_it_runs(llm, ran, lengths):
    """Prompts of one token, of one more than a chunk, and more of both than there are slots."""
    done = llm.generate([ids(n, seed) for seed, n in enumerate(lengths)], params())
    assert [len(c.tokens) for c in done] == [4] * len(lengths)
    again = llm.generate([ids(n, seed) for seed, n in enumerate(lengths)], params())
    assert [c.tokens for c in again] == [c.tokens for c in done]
    assert {shape.kind for shape in ran} >= {"decode"}


def test_the_first_token_comes_before_decode_is_there(llm, slow_decode):
    stream = llm.stream(ids(7), params())
    assert next(stream).tokens
    assert not slow_decode
    assert next(stream).tokens
    assert len(slow_decode) == 1


def test_one_token_is_enough_for_who_wants_one(llm, slow_decode):
    assert len(llm.generate([ids(7)], params(max_tokens=1))[0].tokens) == 1
    assert not slow_decode


@pytest.mark.parametrize("given", [{}, {"num_beams": 2}, {"num_beams": 2, "n": 2}], ids=str)
@pytest.mark.parametrize("length", [1, 9, 513])
def test_what_is_compiled_late_is_in_nobodys_times(llm, slow_decode, length, given):
    llm.generate([ids(length, seed=5)], params(**given))  # whatever else has to be made once
    llm._engine = None
    slow_decode.clear()
    for completion in llm.generate([ids(length)], params(**given)):
        times = completion.timings
        assert 0 < times["ttft_s"] < PAUSE_S
        rate = times["decode_tok_per_s"]  # 0 where one dispatch gave all tokens
        assert rate == 0 or 3 / rate < PAUSE_S
    assert len(slow_decode) == 1


def test_a_stream_that_is_left_after_its_first_token_leaves_nothing_behind(llm, ran):
    wanted = llm.generate([ids(20)], params())[0].tokens
    llm._engine = None
    stream = llm.stream(ids(9), params())
    next(stream)
    stream.close()
    assert llm.generate([ids(20)], params())[0].tokens == wanted


def test_a_stream_that_is_over_leaves_the_engine_to_the_next(llm):
    wanted = llm.generate([ids(6)], params(6))[0].tokens
    first = llm.stream(ids(5), params(2))
    while next(first).completion is None:
        pass
    second = llm.stream(ids(6), params(6))
    begun = next(second).tokens
    assert list(first) == []
    assert begun + tuple(t for delta in second for t in delta.tokens) == wanted
