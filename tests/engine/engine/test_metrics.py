"""What the engine's histograms and metrics count: pure Python."""

import pytest

from rooflax import LLM, ExecutionOptions
from rooflax.engine.metrics import Histogram, Metrics
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0), [0, 0, 0])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 5.5)


def test_the_times_of_a_request_add_up():
    metrics, params = Metrics(), SamplingParams(max_tokens=3, n=2)
    for index, reason in enumerate(("stop", "length", "abort")):
        sequence = Sequence(0, [1, 2], params, 3, frozenset(), sample_index=index)
        sequence.times.arrival_s, sequence.times.admitted_s = 10.0, 11.0
        for now_s in (13.0, 14.0, 17.0):
            metrics.token(sequence, now_s)
            sequence.append(5, now_s)
        sequence.finish(reason)
        metrics.finished(sequence, 17.5)
    found = metrics.as_dict()
    totals = {name: found[name]["total"] for name in found if name.endswith("_s")}
    assert totals == {
        "ttft_s": 9.0, "itl_s": 12.0, "e2e_s": 15.0, "queue_s": 2.0, "prefill_s": 4.0,
        "decode_s": 8.0, "inference_s": 12.0, "tpot_s": 4.0, "step_s": 0.0,
    }  # fmt: skip
    assert (found["prompt_tokens"]["total"], found["output_tokens"]["total"]) == (4, 6)
    assert (found["samples"]["total"], found["max_tokens"]["total"]) == (2, 6)


def test_what_never_ran_has_no_times():
    metrics = Metrics()
    sequence = Sequence(0, [1, 2], SamplingParams(), 3, frozenset())
    sequence.finish("length")
    metrics.finished(sequence, 1.0)
    assert metrics.num_finished == {"length": 1} and metrics.e2e_s.total == 0


def test_metrics_are_plain_values():
    found = Metrics().as_dict()
    assert all(isinstance(v, int | float | list | dict | None) for v in found.values())


def test_decoding_is_a_share_of_what_the_machine_allows():
    metrics = Metrics()
    assert metrics.decode_roofline is None
    for _ in range(500):
        metrics.decoded(0.4, 0.1)
    assert metrics.decode_roofline == pytest.approx(0.25)
    for _ in range(500):
        metrics.decoded(0.2, 0.1)
    assert metrics.decode_roofline == pytest.approx(0.5, abs=1e-3)  # what was long ago is forgotten
    assert metrics.ideal_decode_seconds / metrics.decode_seconds == pytest.approx(1 / 3)
    metrics.called(3, 16, 0.25)
    assert metrics.step_s.total == 0.25
    assert (metrics.num_program_tokens, metrics.num_padding_tokens) == (16, 13)


@pytest.mark.parametrize(("use_cache", "speculate"), [(True, None), (True, "ngram"), (False, None)])
def test_no_more_tokens_run_than_programs_are_made_for(use_cache, speculate):
    options = ExecutionOptions(use_cache=use_cache)
    llm = LLM("preset:qwen2.5-tiny", options=options, speculate=speculate, max_num_seqs=4)
    sequences = llm.processor.samples(0, [5, 6, 7] * 9, SamplingParams(max_tokens=20, n=3))
    engine = llm.engine_for([sample.sequence for sample in sequences])
    engine.ideal_decode_s = lambda rows, context: 1e-9 * rows * context
    engine.add([sample.sequence for sample in sequences])
    before = 0
    while engine.has_unfinished:
        engine.step()
        metrics = engine.metrics
        assert before <= metrics.num_padding_tokens < metrics.num_program_tokens
        before = metrics.num_padding_tokens
    if use_cache:
        assert 0 < metrics.decode_roofline < 1
