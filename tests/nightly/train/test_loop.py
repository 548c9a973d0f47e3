"""Longer tests beside those of tests/engine/train/test_loop.py."""

import jax
import pytest

from rooflax.train.log import read_log
from rooflax.train.loop import run_training
from tests.support.train import tiny


def test_without_held_out_rows_and_with_scanned_layers(corpora, tmp_path):
    config = tiny.settings(steps=2, layers="scan", remat="nothing", eval_every=1)
    plain = tiny.settings(steps=2)
    result = run_training(tiny.make_model(), config, corpora[0], None, tmp_path / "a")
    other = run_training(tiny.make_model(), plain, corpora[0], None, tmp_path / "b")
    assert (result.held_out_loss, result.bits_per_byte) == (None, None)
    assert jax.tree.structure(result.model) == jax.tree.structure(other.model)
    assert result.loss == pytest.approx(other.loss, rel=1e-5)
    assert len(read_log(tmp_path / "a" / "log.jsonl")) == 2


def test_tokens_in_place_of_steps(corpora, tmp_path):
    config = tiny.settings(tokens=2 * 64 + 1)
    result = run_training(tiny.make_model(), config, corpora[0], None, tmp_path)
    assert (result.step, result.tokens) == (3, 3 * 64)
