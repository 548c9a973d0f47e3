"""Longer tests beside those of tests/engine/loading/test_template_pool.py."""

import statistics
import time

from tests.engine.loading.test_template_pool import CHAT, GOOD
from tests.support.loading.rendering import render


# times mean something on a quiet machine only
def test_a_good_template_takes_little_once_warm():
    def milliseconds():
        begin = time.perf_counter()
        render(GOOD, CHAT, bos_token="<s>")
        return 1000 * (time.perf_counter() - begin)

    milliseconds()
    assert statistics.median(milliseconds() for _ in range(30)) < 5
