"""Longer tests beside those of tests/engine/train/test_checkpoint.py."""

import shutil

from tests.engine.train import test_checkpoint as beside
from tests.engine.train.test_checkpoint import assert_same_run, run

uninterrupted = beside.uninterrupted


def test_going_on_from_an_older_checkpoint_gives_the_same_run(uninterrupted, corpora, tmp_path):
    whole, wanted = uninterrupted
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000009")
    result = run(folder, corpora, seed=99)  # the weights given do not count any more
    assert (result.step, result.loss) == (wanted.step, wanted.loss)
    assert result.held_out_loss == wanted.held_out_loss
    assert_same_run(folder, whole)


def test_a_finished_run_adds_nothing(uninterrupted, corpora, tmp_path):
    whole, wanted = uninterrupted
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    result = run(folder, corpora)
    assert result.held_out_loss == wanted.held_out_loss
    assert (result.loss, result.step, result.interrupted) == (wanted.loss, 9, False)
    assert_same_run(folder, whole)
