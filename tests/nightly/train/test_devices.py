"""Further meshes beside those of tests/engine/train/test_devices.py."""

import pytest

from tests.engine.train.test_devices import check_losses, check_split
from tests.support.train import meshes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return meshes.found(tmp_path_factory.mktemp("meshes"), "more")["runs"]


@pytest.mark.parametrize("kind", meshes.MORE_MESHES)
def test_losses_are_those_of_one_device(runs, kind):
    check_losses(runs[kind])


def test_the_state_is_split(runs):
    check_split(runs["full"]["fsdp=4"], 0.3)
