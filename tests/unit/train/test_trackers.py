"""What trackers get of a run's log, by modules that stand in for theirs."""

import sys
from types import SimpleNamespace

import pytest

from rooflax.errors import RequestError
from rooflax.train.trackers import PACKAGES, TRACKERS, metrics, tracker_module, tracking

LINES = [
    {"step": 0, "settings": {"steps": 3}},
    {"step": 0, "tokens": 0, "held_out_loss": 4.5, "bits_per_byte": 2.0, "whole": False},
    {"step": 0, "samples": [{"prompt": "a", "text": "b"}]},
    {"step": 1, "tokens": 8, "loss": 4.0, "lr": 0.1, "time": {"step_s": 0.5, "tok_per_s": 16.0}},
    {"step": 1, "tokens": 8, "held_out_loss": 3.5, "reward": 0.25, "whole": True},
]
SENT = [
    ({"eval/tokens": 0, "eval/loss": 4.5, "eval/bits_per_byte": 2.0}, 0),
    (
        {"train/tokens": 8, "train/loss": 4.0, "train/lr": 0.1, "train/step_s": 0.5,
         "train/tok_per_s": 16.0}, 1,
    ),
    ({"eval/tokens": 8, "eval/loss": 3.5, "eval/reward": 0.25}, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    monkeypatch.setenv("WANDB_DIR", "")  # which would be set


def test_numbers_of_lines_by_their_names():
    assert [(m, line["step"]) for line in LINES if (m := metrics(line))] == SENT


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_api_that_two_have_in_common(monkeypatch, tmp_path, capsys, name):
    calls = []
    module = SimpleNamespace(
        init=lambda **given: (print("a line of theirs"), calls.append(("init", given))),
        log=lambda values, step: calls.append((values, step)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    with tracking(name, tmp_path / "run", {"steps": 3}) as track:
        for line in LINES:
            track(line)
        assert "finish" not in calls
    project = "mine" if name == "trackio" else "rooflax"
    started = ("init", {"project": project, "name": "run", "config": {"steps": 3}})
    assert calls == [started, *SENT, "finish"]
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "a line of theirs\n")


def test_it_ends_with_a_run_that_fails(monkeypatch, tmp_path):
    calls = []
    module = SimpleNamespace(init=lambda **_: None, finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(KeyError), tracking("wandb", tmp_path, {}):
        raise KeyError
    assert calls == ["finish"]


def test_one_that_does_not_start_is_one_sentence(monkeypatch, tmp_path):
    def init(**_):
        raise ValueError("no key.\nSee the manual.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with (
        pytest.raises(RequestError, match=r"^wandb does not start: no key\.$"),
        tracking("wandb", tmp_path, {}),
    ):
        raise AssertionError


def test_tensorboard_gets_files_in_the_runs_folder(monkeypatch, tmp_path):
    """What a killed run had sent from the first step on is taken back."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    with tracking("tensorboard", tmp_path, {}) as track:
        for line in LINES[3:]:
            track(line)
    sent = [(name, value, step) for values, step in SENT[1:] for name, value in values.items()]
    assert calls == [(str(tmp_path / "tensorboard"), 1), *sent, "close"]
    calls.clear()
    with tracking("tensorboard", tmp_path, {}):
        pass
    assert calls == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(monkeypatch, name):
    for package in ("tensorboardX", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RequestError, match=rf"pip install {PACKAGES.get(name, name)}`"):
        tracker_module(name)


def test_nobody_is_told_unless_asked(tmp_path):
    with tracking(None, tmp_path, {}) as track:
        track(LINES[3])
