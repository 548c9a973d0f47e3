"""Longer tests beside those of tests/engine/test_request_fuzz.py."""

import os

from tests.engine.test_request_fuzz import run


def test_many_random_requests_beside_a_victim():
    ended, victims = run(int(os.environ.get("REQUESTS", "1000")))
    print(victims, "victims;", {how: ended.count(how) for how in set(ended)})
