"""Lists of tokens give what 0.1.0's rectangles gave: windows, beams, drafts, scores, offloaded
layers, every family.

Runs over several processes and meshes are held to one process's (tests/engine/test_processes.py,
tests/engine/test_sharding.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.marks import cases
from tests.support.engine import pinned

pytestmark = pytest.mark.oldest_jax

WANTED = json.loads((Path(__file__).parents[2] / "data" / "pinned_tokens.json").read_text())


@pytest.mark.parametrize(
    "family", cases(pinned.FAMILIES, default=["gpt_oss"], every_jax=["gpt_oss"])
)
def test_tokens_and_scores_are_those_of_rectangles(family, tmp_path):
    found = pinned.scenarios(tmp_path, (family,))
    assert set(found) == {name for name in WANTED if name.startswith(f"{family} ")}
    for name, value in found.items():
        if name.endswith("scores"):
            for row, wanted in zip(value, WANTED[name], strict=True):
                # float32 rounds differently with XLA's own fusions and on other processors
                np.testing.assert_allclose(row, wanted, rtol=0, atol=2e-5)
        else:
            assert value == WANTED[name], name
