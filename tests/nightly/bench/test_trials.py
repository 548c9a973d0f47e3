"""Longer tests beside those of tests/engine/bench/test_trials.py."""

import time

from rooflax.bench import trials
from rooflax.bench.measure import Bench
from tests.engine.bench.test_trials import TINY


# times mean something on a quiet machine only
def test_the_clock_costs_under_one_percent():
    """What bench does around the engine's steps, against the steps."""
    bench = Bench(TINY)
    trials.warm_up(bench.run)

    def spent_in_steps():
        inside, step = [], bench.engine.step

        def measured():
            start = time.perf_counter()
            out = step()
            inside.append(time.perf_counter() - start)
            return out

        bench.engine.step = measured
        line = bench.run()
        bench.engine.step = step
        return sum(inside), line.ttft_s + line.decode_s

    shares = [1 - steps / whole for steps, whole in (spent_in_steps() for _ in range(9))]
    assert sorted(shares)[len(shares) // 2] < 0.01
