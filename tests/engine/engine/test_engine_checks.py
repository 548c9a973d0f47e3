"""What an engine rejects before it runs, and how many tokens its steps may have."""

from types import SimpleNamespace

import pytest

from rooflax import EngineError, ExecutionOptions, RequestError, SamplingParams, load
from rooflax.engine.buckets import StepKind
from rooflax.engine.engine import Engine
from rooflax.engine.sequence import Sequence
from rooflax.engine.step_budget import FEWEST_TIMED, FIRST_BUDGET
from rooflax.nn.engine_config import EngineConfig


@pytest.fixture(scope="module")
def model():
    return load("preset:gpt2-tiny", max_model_len=64)


def engine_of(model, layers="unrolled", **given):
    options = ExecutionOptions(layers=layers, kernels="xla")
    return Engine(
        model, EngineConfig(options=options, **{"max_num_seqs": 2, "max_model_len": 64} | given)
    )


def sequence(prompt_tokens, max_tokens):
    params = SamplingParams(temperature=0.0).with_defaults({})
    return Sequence(0, [3] * prompt_tokens, params, max_tokens, frozenset())


def test_layers_that_the_options_do_not_run_are_rejected(model):
    with pytest.raises(EngineError, match="unstacked layers and layers='scan'"):
        engine_of(model, "scan")
    with pytest.raises(EngineError, match="stacked layers and layers='unrolled'"):
        engine_of(model.stacked())


def test_what_could_outgrow_the_context_is_rejected(model):
    engine = engine_of(model)
    engine.check([sequence(60, 5)])  # the last token is not run
    with pytest.raises(RequestError, match="66 tokens and the context holds 64"):
        engine.check([sequence(60, 6)])


def test_a_servers_budget_follows_what_tokens_take(model):
    engine = engine_of(model, step_s=0.3, max_tokens_per_step=512)
    time_tokens = engine.step_budget.time_tokens
    assert engine.scheduler.token_budget == FIRST_BUDGET
    time_tokens(engine.scheduler, FEWEST_TIMED - 1, 100.0)
    assert engine.scheduler.token_budget == FIRST_BUDGET
    time_tokens(engine.scheduler, 100, 0.1)
    assert engine.scheduler.token_budget == 300
    time_tokens(engine.scheduler, 100, 100.0)  # as when the machine was suspended
    assert engine.scheduler.token_budget == FEWEST_TIMED  # so that the next ones are timed too
    for _ in range(40):
        time_tokens(engine.scheduler, FEWEST_TIMED, FEWEST_TIMED * 0.0001)
    assert engine.scheduler.token_budget == 512


@pytest.mark.parametrize(("burst_s", "num_steps"), [(0.15, 12), (0.05, 4), (0.01, 1)])
def test_decode_steps_of_a_dispatch_fit_into_a_moment(model, burst_s, num_steps):
    engine = engine_of(model, burst_s=burst_s)
    assert engine.scheduler.steps_per_dispatch == 1
    call = SimpleNamespace(shape=SimpleNamespace(kind=StepKind.DECODE))
    engine.step_budget.after_call(engine.scheduler, call, 5, 5 * 0.012)
    assert engine.scheduler.steps_per_dispatch == num_steps
