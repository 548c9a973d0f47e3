"""Runs on meshes of simulated devices: losses, memory, another number of devices."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.train.log import read_log
from rooflax.train.loop import run_training
from tests import processes
from tests.support.train import meshes, tiny

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return meshes.found(tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("kind", meshes.MESHES)
def test_losses_are_those_of_one_device(found, kind):
    check_losses(found["runs"][kind])


def check_losses(runs):
    alone = runs["None"]
    assert alone["devices"] == 1
    assert len(alone["losses"]) == meshes.STEPS
    assert abs(alone["losses"][-1] - alone["losses"][0]) > 0.003
    for mesh, own in runs.items():
        if mesh == "None":
            continue
        assert own["devices"] == np.prod([int(part[-1]) for part in mesh.split(",")]), mesh
        np.testing.assert_allclose(own["losses"], alone["losses"], rtol=0, atol=1e-5, err_msg=mesh)
        assert own["held_out"] == pytest.approx(alone["held_out"], abs=1e-5), mesh


@pytest.mark.parametrize(
    ("kind", "mesh", "share"),
    [
        ("full", "fsdp=2,tensor=2", 0.4),  # the vocabulary, which is odd, is not split over tensor
        ("dora", "fsdp=4", 0.3),
    ],
)
def test_the_state_is_split(found, kind, mesh, share):
    check_split(found["runs"][kind][mesh], share)


def check_split(own, share):
    assert own["most"] <= share * own["bytes"]


def test_a_run_goes_on_with_other_devices(found):
    alone = found["runs"]["full"]["None"]["losses"]
    np.testing.assert_allclose(found["resumed"], alone, rtol=0, atol=1e-5)


def test_two_processes_train_as_one_does(found, tmp_path):
    alone = found["runs"]["full"]["None"]
    for own in processes.ask("train", tmp_path, "data=2,fsdp=4"):
        assert own["devices"] == processes.DEVICES
        np.testing.assert_allclose(own["losses"], alone["losses"], rtol=0, atol=1e-5)
        assert own["held_out"] == pytest.approx(alone["held_out"], abs=1e-5)
        assert own["most"] <= 0.3 * own["bytes"]
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    config = meshes.settings("full", checkpoint_every=2)
    run_training(tiny.make_model(**meshes.WIDE), config, meshes.corpus(), None, tmp_path / "run")
    lines = read_log(tmp_path / "run/log.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(losses, alone["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("line", "steps", "said"),
    [
        ("nothing", (4, 4), ["texts.jsonl is not JSON", "process 0 ended: line 1 of"]),
        ('{"text": "a b c"}', (4, 5), ["steps is 4 in process 0", "steps is 5 in process 1"]),
    ],
)
def test_what_one_process_of_a_job_rejects_ends_the_other(tmp_path, line, steps, said):
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "texts.jsonl").write_text(line + "\n")
    command = [sys.executable, "-m", "rooflax", "train", "--config", tmp_path / "config.json"]
    command += ["--data", tmp_path / "texts.jsonl", "--vocab-size", "280", "--mesh", "data=2"]
    command += ["--coordinator", f"localhost:{processes.free_port()}", "--num-processes", "2"]
    command += ["--out", tmp_path / "run", "--platform", "cpu"]
    running = [
        subprocess.Popen(
            [*command, "--process-id", str(index), "--steps", str(count)],
            stderr=subprocess.PIPE, text=True, env=processes.devices(1),
        )
        for index, count in enumerate(steps)
    ]  # fmt: skip
    errors = [each.communicate(timeout=100)[1] for each in running]
    assert [each.returncode for each in running] == [2, 2], errors
    for text, wanted in zip(errors, said, strict=True):
        assert wanted in text and text.count("\n") == 1, text


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, "2 processes and no mesh"), ({"mesh": "data=2", "train_mode": "dpo"}, "dpo is for one")],
)
def test_what_several_processes_do_not_train_is_said(corpora, tmp_path, monkeypatch, changes, said):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RequestError, match=said):
        run_training(tiny.make_model(), tiny.settings(**changes), *corpora, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SETTINGS = {
    "stage=2": ({}, "it must be AXIS=N .* of data, fsdp, tensor"),
    "data=3": ({}, "batch_size is 4, which does not divide by 3"),
    "data=2": (
        {"train_mode": "grpo", "reward": "x.py:f", "batch_size": 8, "max_completion_length": 9},
        "on one device",
    ),
}


@pytest.mark.parametrize("mesh", SETTINGS)
def test_settings_that_a_mesh_does_not_go_with(mesh):
    changes, said = SETTINGS[mesh]
    with pytest.raises(RequestError, match=said):
        tiny.settings(mesh=mesh, **changes)


MODELS = {
    "tensor=3": ({}, "mesh tensor=3 needs 3 devices, here: 2"),
    "tensor=2": ({"num_key_value_heads": 3}, "3 kv_heads do not divide over 2 devices"),
    "fsdp=2": ({"hidden_size": 35}, "no axis of embed .281, 35. divides over fsdp=2 devices"),
}


@pytest.mark.parametrize("mesh", MODELS)
def test_a_model_that_does_not_divide_is_said(corpora, tmp_path, mesh):
    changes, said = MODELS[mesh]
    model = tiny.make_model(**changes)
    with pytest.raises(RequestError, match=said) as caught:
        run_training(model, tiny.settings(mesh=mesh), *corpora, tmp_path)
    assert "\n" not in str(caught.value)
