"""Longer tests beside those of tests/engine/engine/test_same_tokens.py."""

from dataclasses import replace

import numpy as np
import pytest

from rooflax import load
from rooflax.ops.native import is_ready
from tests.engine.engine.test_same_tokens import Mixed, small_engine
from tests.support.engine.load import random_requests, run_alone, run_load


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize(
    "preset",
    [
        "preset:gpt2-tiny",
        "preset:qwen2.5-tiny",
    ],
)
@pytest.mark.parametrize(
    ("roomy", "drafts"),
    [
        (False, True),
        (False, False),
        (True, False),
        (True, True),
    ],
)
def test_keys_and_values_are_the_same_to_the_bit_on_cpu(preset, roomy, drafts):
    """What a crowd computes in chunks of 16 and shares, against each request alone in one chunk."""
    model = load(preset)
    requests = [replace(r, aborts=None) for r in random_requests(3, 16)]
    alone = small_engine(model, chunk=64, steps=8, cache=True, slots=1, roomy=True, kernels=None)
    wanted = run_alone(alone, requests)
    crowd = small_engine(
        model, chunk=16, steps=8, cache=True, roomy=roomy, kernels=None,
        drafter=Mixed(wanted) if drafts else None,
    )  # fmt: skip
    run = run_load(crowd, requests)
    assert run.tokens == wanted
    blocks = crowd.scheduler.blocks.pools[0]._block_of
    others = alone.scheduler.blocks.pools[0]._block_of
    shared = [(block, others[h]) for h, block in blocks.items() if h in others]
    assert len(shared) >= (8 if roomy else 4)
    assert (crowd.scheduler.num_preemptions == 0) == roomy
    mine, theirs = (list(column) for column in zip(*shared, strict=True))
    for name in ("k", "v"):
        for a, b in zip(
            getattr(crowd.runner.cache, name), getattr(alone.runner.cache, name), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a)[mine], np.asarray(b)[theirs])
