"""How many blocks an engine gets, and what its histograms count: pure Python."""

from types import SimpleNamespace

import pytest

from rooflax.engine.metrics import Histogram, Metrics
from rooflax.engine.plan import plan_blocks
from rooflax.errors import RequestError
from rooflax.nn.kv_cache import LayerGroups

GROUPS = LayerGroups.from_windows((None, 32, None, 32, 32))
CONFIG = SimpleNamespace(num_kv_heads=2, head_dim=8, groups=GROUPS)
WORK = {"kv_dtype": "float32", "num_slots": 4, "max_tokens": 160, "new_tokens": 64}


def plan(limit_bytes, **given):
    return plan_blocks(CONFIG, block_size=16, limit_bytes=limit_bytes, **WORK | given)


def test_without_a_limit_every_slot_has_its_longest_context():
    full, window = plan(None)
    assert full == 1 + 4 * 10  # 160 tokens
    assert window == 1 + 4 * 7  # 32 + 64 - 1 tokens, and a block that is begun


def test_a_limit_is_kept_and_the_arithmetic_is_said():
    block = 2 * 2 * 8 * 4 * 16
    need = [2 * (1 + n * 10) + 3 * (1 + n * 7) for n in range(5)]
    assert plan(need[4] * block) == plan(None)
    assert plan(need[4] * block - 1) == (1 + 3 * 10, 1 + 3 * 7)
    assert plan(need[1] * block) == (11, 8)
    least = need[1] * block
    with pytest.raises(
        RequestError, match=rf"{least:,} bytes\) and .*{least - 1:,} bytes\) is there"
    ):
        plan(least - 1)
    assert plan(need[4] * block // 2, kv_dtype="bfloat16") == plan(None)


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0), [0, 0, 0])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 5.5)


def test_metrics_are_plain_values():
    found = Metrics().as_dict()
    assert all(isinstance(v, int | list | dict) for v in found.values())
