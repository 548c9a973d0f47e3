"""Longer tests beside those of tests/unit/bench/test_figures.py."""

from rooflax.bench.compare import interleaved
from rooflax.bench.measure import Bench
from rooflax.bench.workload import Workload


def test_of_twenty_comparisons_of_a_model_with_itself_at_least_eighteen_give_no_verdict():
    work = Workload("preset:qwen2.5-tiny", prompt_tokens=8, output_tokens=17, trials=6)
    jobs = [Bench(work).run, Bench(work).run]
    found = [interleaved(jobs, work, "itself") for _ in range(20)]
    assert all(comparison.same_tokens for comparison in found)
    for quantity in ("decode", "prefill"):
        verdicts = [getattr(comparison, quantity).verdict for comparison in found]
        assert verdicts.count("no difference shown") >= 18, verdicts
