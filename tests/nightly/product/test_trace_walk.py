"""Requests enter few files: tools/trace_walk.py."""

import pytest

from tools import trace_walk


@pytest.mark.parametrize(("name", "last"), [("prompt", "completion"), ("chat", "engine.thread")])
def test_a_request_enters_few_files(name, last):
    walk = trace_walk.WALKS[name]()
    assert f"rooflax.{last}" in walk.files
    assert len(walk.files) <= 40, sorted(walk.files)
