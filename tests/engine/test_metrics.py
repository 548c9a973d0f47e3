"""What the engine's histograms and metrics count: pure Python."""

from rooflax.engine.metrics import Histogram, Metrics


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0), [0, 0, 0])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 5.5)


def test_metrics_are_plain_values():
    found = Metrics().as_dict()
    assert all(isinstance(v, int | list | dict) for v in found.values())
