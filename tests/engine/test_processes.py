"""Jobs of two processes with four simulated devices each."""

import argparse
import os

import jax
import pytest

from rooflax import LLM
from rooflax.cli import platform
from rooflax.errors import RequestError
from tests import processes
from tests.sharding import CONFIGS, write_checkpoint


def test_memory_of_a_process_stays_near_what_its_devices_hold(tmp_path, monkeypatch):
    wide = CONFIGS["llama"] | {"hidden_size": 768, "intermediate_size": 3072, "head_dim": 96}
    monkeypatch.setitem(CONFIGS, "llama", wide)
    path = write_checkpoint(tmp_path, "llama")
    for own in processes.ask("memory", path, "stage=2,tensor=4"):
        assert 60e6 < own["held"] < 0.6 * own["whole"]
        assert own["grown"] < 1.3 * own["held"]


def test_what_several_processes_cannot_do_alike_is_rejected(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = jax.make_mesh((2,), ("tensor",))
    for said, arguments in (
        ("There are 2 processes and no mesh", {}),
        ("own clock", {"mesh": mesh, "speculate": "ngram"}),
        ("a mesh of several processes takes all of them", {"mesh": "tensor=1"}),
    ):
        with pytest.raises(RequestError, match=said):
            LLM("preset:qwen2.5-tiny", **arguments)


@pytest.mark.parametrize("variable", [platform.COUNT_VARIABLE, platform.NUMBER_VARIABLE])
def test_a_variable_that_is_no_number_is_rejected(variable, monkeypatch):
    for name in (platform.COUNT_VARIABLE, platform.NUMBER_VARIABLE):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv(variable, "two")
    args = argparse.Namespace(coordinator="localhost:1", num_processes=None, process_id=None)
    with pytest.raises(RequestError, match=f"{variable} is 'two'; it must be a whole number"):
        platform.join_processes(args)


def test_a_leader_worker_set_names_a_job(monkeypatch):
    for name in (platform.COORDINATOR_VARIABLE, platform.COUNT_VARIABLE, platform.NUMBER_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    args = argparse.Namespace(coordinator=None, num_processes=None, process_id=None)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "rooflax-0.rooflax.default")
    for size, is_job in (("1", False), ("2", True)):
        monkeypatch.setenv("LWS_GROUP_SIZE", size)
        monkeypatch.setenv("LWS_WORKER_INDEX", "1")
        assert platform.names_job(args) == is_job
    assert os.environ[platform.COORDINATOR_VARIABLE] == "rooflax-0.rooflax.default:8476"
    assert os.environ[platform.COUNT_VARIABLE] == "2"
    assert os.environ[platform.NUMBER_VARIABLE] == "1"
    assert not platform.names_job(argparse.Namespace())  # a verb of one process
