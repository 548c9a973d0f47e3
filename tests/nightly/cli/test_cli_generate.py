"""Longer tests beside those of tests/engine/cli/test_cli_generate.py."""

import numpy as np

from tests import goldens


def test_log_probabilities_that_are_no_numbers_are_no_json(rooflax, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"][:] = np.nan

    reference = goldens.committed("llama_gqa")
    folder = goldens.write_checkpoint(tmp_path / "m", "llama_gqa", reference, change=change)
    ran = rooflax("generate", folder, "-p", "a", "-n", 2, "--logprobs", 2, "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "--check" in ran.err
    assert len(ran.err.splitlines()) == 1
