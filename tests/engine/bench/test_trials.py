"""The traps of measuring: each is caught, or the figure is corrected."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.bench import trials
from rooflax.bench.measure import Bench, measure
from rooflax.bench.timeline import Timeline
from rooflax.bench.timing import timed
from rooflax.bench.workload import Workload
from rooflax.errors import EngineError
from tests.support.bench.samples import CEILING, timeline

TINY = Workload("preset:qwen2.5-tiny", prompt_tokens=4, output_tokens=6, trials=2)


def ceiling():
    return CEILING


def compiling_job(lengths):
    """A job whose every run has the next of these lengths, so that new ones compile."""
    double = jax.jit(lambda x: x * 2)
    remaining = iter(lengths)

    def job():
        double(np.zeros(next(remaining))).block_until_ready()
        return timeline()

    return job


def test_a_warm_up_shorter_than_the_work_goes_on_until_nothing_compiles():
    assert trials.warm_up(compiling_job([5, 6, 7, 7, 7])) == 4


def test_a_shape_that_changes_in_every_run_is_rejected():
    with pytest.raises(EngineError, match="a shape or a constant changes"):
        trials.warm_up(compiling_job(range(100)))


def test_a_trial_in_which_something_compiled_is_void_and_taken_again():
    job = compiling_job([3, 3, 3, 4, 3, 3])
    trials.warm_up(job)
    valid, void = trials.run_trials(job, ceiling, 3)
    assert len(valid) == 3
    assert len(void) == 1
    assert void[0].is_void
    assert not any(trial.is_void for trial in valid)


def test_trials_that_keep_compiling_give_no_figure():
    with pytest.raises(EngineError, match="no figure is valid"):
        trials.run_trials(compiling_job(range(1, 100)), ceiling, 3)


def slow(x):
    return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y), x)


def test_a_result_that_is_not_awaited_is_awaited():
    """A call returns when its work is dispatched; its time is taken when the work is done."""
    call, x, results = jax.jit(slow), jnp.ones((400, 400)), []
    jax.block_until_ready(call(x))

    def dispatch(x):
        results.append(call(x))
        return results[-1]

    assert not dispatch(x).is_ready()
    timed(dispatch, x)
    assert results[-1].is_ready()


def test_tokens_are_on_the_host_when_their_time_is_taken():
    bench = Bench(TINY)
    line = bench.run()
    assert all(isinstance(token, int) for row in line.tokens for token in row)
    assert line.start_s < line.first_s <= max(row[-1] for row in line.arrivals_s)


def test_loading_and_compiling_are_outside_the_clock(monkeypatch):
    load = Bench.__init__

    def slow_load(self, work):
        time.sleep(1.0)
        load(self, work)

    monkeypatch.setattr(Bench, "__init__", slow_load)
    result = measure(TINY)
    assert result["ttft_s"]["max"] + 5 * result["tpot_s"]["max"] < 0.9
    assert result["compilations_while_timed"] == 0
    assert result["warm_ups"] >= 1


def test_the_ceilings_are_read_around_every_trial():
    order = []

    def read():
        order.append("ceiling")
        return CEILING

    def job():
        order.append("job")
        return timeline()

    trials.run_trials(job, read, 2)
    assert order == ["ceiling", "job", "ceiling"] * 2


def test_metrics_of_a_timeline_written_by_hand():
    line = Timeline(10.0, [[10.5, 10.6, 10.7], [10.25, 10.6, 11.0]], [(1, 2, 3), (4, 5, 6)])
    assert line.ttft_s == pytest.approx(0.5)
    assert line.decode_s == pytest.approx(0.5)
    assert line.tpot_s == pytest.approx(0.25)
    assert line.decode_tok_per_s == pytest.approx(2 * 2 / 0.5)
    assert line.prefill_tok_per_s(8) == pytest.approx(16 / 0.5)
