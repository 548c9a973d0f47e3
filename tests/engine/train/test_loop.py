"""A run from its first step to its last: log, held-out loss, curves, progress."""

import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import CheckpointError, EngineError, RequestError
from rooflax.train import loop
from rooflax.train.data import Rows
from rooflax.train.log import TrainLog, read_log
from rooflax.train.loop import run_training, write_curves
from rooflax.train.plot import plot_curves
from rooflax.train.step import learning_rate, make_eval_step
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

CONFIG = tiny.settings(
    steps=50, batch_size=8, micro_batches=2, seq_len=24, learning_rate=1e-2, eval_every=20,
    eval_batches=2, checkpoint_every=30,
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpora):
    """(folder, result, log) of one run."""
    folder = tmp_path_factory.mktemp("runs") / "new" / "run"
    result = run_training(tiny.make_model(), CONFIG, *corpora, folder)
    return folder, result, read_log(folder / "log.jsonl")


@pytest.mark.every_jax
def test_a_line_per_step(finished):
    _, _, log = finished
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 51))
    rate = learning_rate(CONFIG)
    for line in steps:
        assert line.keys() == {"step", "tokens", "loss", "lr", "grad_norm", "time"}
        assert line["tokens"] == line["step"] * 8 * 24
        assert line["lr"] == float(rate(line["step"] - 1))
        assert line["grad_norm"] > 0
        assert line["time"].keys() == {"step_s", "tok_per_s"}
        assert line["time"]["tok_per_s"] > 0


def test_the_loss_falls_from_that_of_a_guess(finished):
    _, result, log = finished
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[0] == pytest.approx(math.log(tiny.VOCAB), rel=0.02)
    assert np.mean(losses[-5:]) < losses[0] - 1.3
    assert result.loss == losses[-1]


def test_held_out_losses(finished, corpora):
    _, result, log = finished
    lines = [line for line in log if "held_out_loss" in line]
    assert [(line["step"], line["whole"]) for line in lines] == [
        (0, False),
        (20, False),
        (40, False),
        (50, True),
    ]
    for line in lines:
        assert line.keys() == {"step", "tokens", "held_out_loss", "bits_per_byte", "whole"}
        assert line["bits_per_byte"] == corpora[1].bits_per_byte(line["held_out_loss"])
    losses = [line["held_out_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert (result.held_out_loss, result.bits_per_byte) == (losses[-1], lines[-1]["bits_per_byte"])
    # a held-out line follows its step's line
    assert log[0] == {"step": 0, "settings": CONFIG.to_json()}
    for before, line in itertools.pairwise(log):
        assert "held_out_loss" not in line or before["step"] == line["step"]


def test_the_last_held_out_loss_is_of_all_rows(finished, corpora):
    """Row by row, with the trained model."""
    _, result, _ = finished
    rows = Rows(corpora[1], CONFIG.seq_len)
    evaluate = make_eval_step(result.model, dataclasses.replace(CONFIG, micro_batches=1))
    total = count = 0.0
    for batch in rows.spread(None, 1):
        loss, tokens, _ = evaluate(result.model.weights, result.model.rope, batch)
        total, count = total + float(loss), count + float(tokens)
    assert result.held_out_loss == pytest.approx(total / count, rel=1e-5)


def test_the_result(finished):
    folder, result, _ = finished
    assert (result.step, result.tokens, result.interrupted) == (50, 50 * 8 * 24, False)
    model = tiny.make_model()
    assert jax.tree.structure(result.model) == jax.tree.structure(model)
    (found,), (wanted,) = result.model.rope, model.rope
    np.testing.assert_array_equal(found.cos, wanted.cos)
    np.testing.assert_array_equal(found.sin, wanted.sin)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "log.jsonl"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000030", "step-00000050",
    ]  # fmt: skip


def test_the_same_run_twice(finished, corpora, tmp_path):
    _, result, log = finished
    config = dataclasses.replace(CONFIG, checkpoint_every=0, keep=1)
    again = run_training(tiny.make_model(), config, *corpora, tmp_path)
    assert tiny.comparable(read_log(tmp_path / "log.jsonl")) == tiny.comparable(log)
    for a, b in zip(
        jax.tree.leaves(again.model.weights), jax.tree.leaves(result.model.weights), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000050"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seq_len": 68}, r"seq_len is 68, but the model takes 67 tokens; choose at most that"),
        (
            {"seq_len": 67, "batch_size": 1},
            r"the corpus has 100 tokens; rows of 67 need at least 134",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path, changes, match):
    corpus = tiny.corpus_of(np.ones(100))
    with pytest.raises(RequestError, match=match):
        run_training(tiny.make_model(), tiny.settings(**changes), corpus, None, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ids_beyond_the_embedding(corpora, tmp_path):
    bad = np.ones(100)
    bad[77] = tiny.VOCAB
    bad = tiny.corpus_of(bad)
    for parts in ((bad, None), (corpora[0], bad)):
        with pytest.raises(
            RequestError, match=rf"token id {tiny.VOCAB}, .* has {tiny.VOCAB} tokens"
        ):
            run_training(tiny.make_model(), tiny.settings(), *parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_held_out_text_too_short_for_a_row(corpora, tmp_path):
    short = tiny.corpus_of(np.ones(20))
    with pytest.raises(
        RequestError, match="held-out corpus has 20 tokens; rows of 16 need at least"
    ):
        run_training(tiny.make_model(), tiny.settings(), corpora[0], short, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bar_where_asked_for(corpora, tmp_path, capsys):
    config = tiny.settings(steps=2)
    for progress in (None, False):
        run_training(
            tiny.make_model(), config, corpora[0], None, tmp_path / str(progress), progress=progress
        )
        assert capsys.readouterr() == ("", "")
    run_training(tiny.make_model(), config, corpora[0], None, tmp_path / "bar", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "training: 100%" in err
    assert "2/2" in err and "compiling" in err


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_a_model_that_is_given_up(corpora, tmp_path, layers):
    """Its arrays are gone; the trained ones, and the lines of the steps, are as with it."""
    config = tiny.settings(steps=5, layers=layers, eval_every=2, checkpoint_every=2)
    logs = []
    for keeps in (True, False):
        model, folder = tiny.make_model(), tmp_path / str(keeps)
        result = run_training(model, config, *corpora, folder, keeps_model=keeps)
        assert {leaf.is_deleted() for leaf in jax.tree.leaves(model.weights)} == {not keeps}
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(result.model.weights))
        lines = [line for line in read_log(folder / "log.jsonl") if "settings" not in line]
        assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
        logs.append([line.get("loss", line.get("held_out_loss")) for line in lines])
    assert logs[0] == logs[1]


WATCHED = tiny.settings(steps=12, eval_every=2, eval_batches=2, learning_rate=1e-2)


def held_out_losses(folder):
    lines = read_log(folder / "log.jsonl")
    return {line["step"]: line["held_out_loss"] for line in lines if line.get("whole") is False}


def test_held_out_losses_are_said_when_taken(corpora, tmp_path):
    said = []
    run_training(tiny.make_model(), WATCHED, *corpora, tmp_path, say=said.append)
    said = [line for line in said if "held-out" in line]  # a slow machine has lines of progress
    losses = held_out_losses(tmp_path)
    assert [*losses] == [0, 2, 4, 6, 8, 10]
    assert said[0] == f"step 0: held-out loss {losses[0]:.4f} (before training)"
    assert said[1].startswith("step 2: loss ") and f"held-out loss {losses[2]:.4f} (" in said[1]
    assert "(the best so far)" in said[-1]


def test_progress_without_a_bar_is_a_line_now_and_then(corpora, tmp_path, monkeypatch):
    """At most one in half a minute, and in a twentieth of the steps."""
    for seconds, wanted in ((0.0, [*range(3, 51, 3)]), (math.inf, [])):
        said = []
        monkeypatch.setattr(loop, "SAID_EVERY_S", seconds)
        folder = tmp_path / str(seconds)
        run_training(tiny.make_model(), CONFIG, *corpora, folder, progress=False, say=said.append)
        steps = [line for line in said if " of 50: loss " in line]
        assert [int(line.split()[1]) for line in steps] == wanted
        assert not any("\r" in line for line in steps)


def test_a_run_goes_on_and_is_made_longer(corpora, tmp_path):
    """It says from where, and how the learning rate goes on."""
    said = []
    run_training(tiny.make_model(), WATCHED, *corpora, tmp_path)
    longer = dataclasses.replace(WATCHED, steps=20)
    result = run_training(tiny.make_model(), longer, *corpora, tmp_path, say=said.append)
    assert (result.step, result.was_complete) == (20, False)
    rates = [line["lr"] for line in read_log(tmp_path / "log.jsonl") if "lr" in line]
    assert rates == [float(learning_rate(WATCHED)(step)) for step in range(12)] + [
        float(learning_rate(longer)(step)) for step in range(12, 20)
    ]
    assert said[0] == "resumes from step 12 of 20"
    assert said[1] == (
        f"the run was for 12 steps: the learning rate, {rates[11]:.3g} in the last step, goes on "
        f"at {rates[12]:.3g} by the schedule of 20 steps"
    )


def test_muon_goes_on_with_its_momentum(corpora, tmp_path):
    config = dataclasses.replace(WATCHED, optimizer="muon", checkpoint_every=5)
    whole = run_training(tiny.make_model(), config, *corpora, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000012")
    again = run_training(tiny.make_model(), config, *corpora, tmp_path)
    assert not again.was_complete and again.loss == whole.loss
    losses = held_out_losses(tmp_path)
    assert losses[10] < losses[0] - 0.1


def test_the_best_weights_are_kept_and_patience_ends(corpora, tmp_path):
    """At a rate that undoes what was learnt, the best is not the last."""
    config = dataclasses.replace(
        WATCHED, steps=60, learning_rate=0.5, warmup_steps=0, patience=2, save_best=True
    )
    result = run_training(tiny.make_model(), config, *corpora, tmp_path)
    losses = held_out_losses(tmp_path)
    best = min(losses, key=losses.__getitem__)
    assert result.stopped_early and not result.interrupted
    assert (result.best_step, result.step) == (best, best + 4)
    assert [path.name for path in (tmp_path / "best").iterdir()] == [f"step-{best:08d}"]
    evaluate = make_eval_step(result.model, config)
    rows = Rows(corpora[1], config.seq_len)
    sums = [
        evaluate(result.model.weights, result.model.rope, batch)
        for batch in rows.spread(config.eval_batches, config.batch_size)
    ]
    loss = sum(float(one[0]) for one in sums) / sum(float(one[1]) for one in sums)
    assert loss == pytest.approx(losses[best], rel=1e-6)
    again = run_training(tiny.make_model(), config, *corpora, tmp_path)
    assert (again.was_complete, again.best_step, again.step) == (True, best, best + 4)
    assert again.held_out_loss == result.held_out_loss


def test_the_best_of_a_run_that_was_killed_is_not_the_next_ones(corpora, tmp_path):
    """Before a checkpoint, and behind one: a stale best is never taken for another."""
    stale = tmp_path / "best" / "step-00000050"
    run_training(tiny.make_model(), WATCHED, *corpora, tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000012", stale)
    config = dataclasses.replace(
        WATCHED, steps=16, learning_rate=3.0, warmup_steps=0, min_lr_ratio=1.0, save_best=True
    )
    result = run_training(tiny.make_model(), config, *corpora, tmp_path)
    assert result.best_step is not None and result.best_step < 16
    (best,) = (tmp_path / "best").iterdir()
    assert best.name == f"step-{result.best_step:08d}"
    best.rename(stale)
    said = []
    gone = run_training(tiny.make_model(), config, *corpora, tmp_path, say=said.append)
    assert gone.best_step is None
    assert f"the weights of step {result.best_step} are gone" in said[-1]


def test_a_run_that_lost_patience_goes_on_when_it_is_made_longer(corpora, tmp_path):
    config = dataclasses.replace(WATCHED, steps=30, learning_rate=0.5, warmup_steps=0, patience=1)
    first = run_training(tiny.make_model(), config, *corpora, tmp_path)
    longer = dataclasses.replace(config, steps=60)
    second = run_training(tiny.make_model(), longer, *corpora, tmp_path)
    assert first.stopped_early and second.step > first.step and not second.was_complete


def test_a_damaged_log_is_said(corpora, tmp_path):
    run_training(tiny.make_model(), tiny.settings(steps=2), *corpora, tmp_path)
    with open(tmp_path / "log.jsonl", "r+b") as log:
        log.write(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="log.jsonl is damaged"):
        run_training(tiny.make_model(), tiny.settings(steps=2), *corpora, tmp_path)


def test_watching_needs_held_out_rows(corpora, tmp_path):
    config = dataclasses.replace(WATCHED, save_best=True)
    with pytest.raises(RequestError, match="need held-out rows"):
        run_training(tiny.make_model(), config, corpora[0], None, tmp_path / "run")


def test_in_a_thread(corpora, tmp_path):
    """Where signals are someone else's."""
    found = []

    def work():
        model = tiny.make_model()
        found.append(run_training(model, tiny.settings(steps=2), corpora[0], None, tmp_path))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].step == 2


def test_curves(finished):
    pytest.importorskip("matplotlib")
    folder, _, log = finished
    assert write_curves(folder) == [folder / "report.html", folder / "curves.png"]
    page = (folder / "report.html").read_text()
    best = min(line["held_out_loss"] for line in log if line.get("whole") is False)
    (end,) = (line["held_out_loss"] for line in log if line.get("whole"))
    assert f"best held-out loss {best:.4f} at step 40, at the end {end:.4f}" in page
    assert "<script" not in page and page.count("<polyline") == 3
    assert f"<td>learning_rate</td><td>{CONFIG.learning_rate}</td>" in page
    (folder / "report.html").unlink()
    picture = (folder / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000
    (folder / "curves.png").unlink()
    assert plot_curves(log[2:3], folder / "curves.png")  # one point, none held out
    (folder / "curves.png").unlink()


def test_without_matplotlib(finished, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_curves(finished[0]) == [finished[0] / "report.html"]
    assert capsys.readouterr() == ("", "")
    assert not (finished[0] / "curves.png").exists()
    (finished[0] / "report.html").unlink()


def test_training_does_not_import_matplotlib():
    code = "import rooflax.train.loop, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_empty_log_has_no_curves(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("")
    write_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()
    assert "nothing yet" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_not_finite_ends_the_run_and_is_not_saved(corpora, tmp_path, monkeypatch, name):
    real = loop.make_train_step

    class Step:
        def __init__(self, *args):
            self.step = real(*args)

        def lower(self, *args):
            self.step = self.step.lower(*args)
            return self

        def compile(self):
            self.step = self.step.compile()
            return self

        def __call__(self, state, *rest):
            number = int(state.step)
            state, metrics = self.step(state, *rest)
            broken = {name: jnp.float32(np.nan)} if number == 5 else {}
            return state, replace(metrics, **broken)

    monkeypatch.setattr(loop, "make_train_step", Step)
    config = tiny.settings(steps=9, checkpoint_every=1)
    with pytest.raises(EngineError, match=rf"{WORDS[name]} is nan at step 6: the run diverged"):
        run_training(tiny.make_model(), config, *corpora, tmp_path)
    newest = loop.list_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == "step-00000005"


WORDS = {"loss": "The loss", "grad_norm": "The gradient's norm"}


def test_a_run_that_diverges_in_its_last_step_gives_no_model(corpora, tmp_path):
    config = tiny.settings(steps=1, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(EngineError, match="The held-out loss is nan at step 1: the run diverged"):
        run_training(tiny.make_model("gpt2"), config, *corpora, tmp_path)


def test_log_lines_are_on_disk_at_once_and_cut_back(tmp_path):
    path = tmp_path / "a" / "log.jsonl"
    with TrainLog(path) as log:
        log.write({"step": 1})
        assert path.read_text() == '{"step": 1}\n'
        position = log.position()
        log.write({"step": 2, "text": "é"})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    with TrainLog(path, position) as log:
        log.write({"step": 3})
        assert log.position() == path.stat().st_size
    assert read_log(path) == [{"step": 1}, {"step": 3}]
    with pytest.raises(CheckpointError, match=r"has 24 bytes, but .* when it had 99; put the log"):
        TrainLog(path, 99)
    assert read_log(path) == [{"step": 1}, {"step": 3}]


def test_times_are_not_compared():
    a, b = [{"step": 1, "time": {"step_s": 1}}], [{"step": 1, "time": {"step_s": 2}}]
    assert tiny.comparable(a) == tiny.comparable(b) == [{"step": 1}]
