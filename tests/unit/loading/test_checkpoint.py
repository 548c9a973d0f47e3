"""Checkpoint folders: one file, shards with an index, and every way to be wrong."""

import json

import numpy as np
import pytest

from rooflax.errors import CheckpointError
from rooflax.loading.checkpoint import INDEX_FILE, WEIGHTS_FILE, Checkpoint
from rooflax.loading.safetensors import write_safetensors


def write(path, *names):
    rows = [(n, "F32", (2,), lambda n=n: np.full(2, len(n), np.float32)) for n in names]
    write_safetensors(path, rows)


def index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path / "s1.safetensors", "a", "bb")
    write(tmp_path / "s2.safetensors", "ccc")
    index(tmp_path, {"a": "s1.safetensors", "bb": "s1.safetensors", "ccc": "s2.safetensors"})
    return tmp_path


def test_single_file(tmp_path):
    write(tmp_path / WEIGHTS_FILE, "a")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == ["a"]
    assert checkpoint.info("a").shape == (2,)
    assert checkpoint.metadata == {"format": "pt"}


def test_shards_read_as_one(sharded):
    checkpoint = Checkpoint(sharded)
    assert sorted(checkpoint.names()) == ["a", "bb", "ccc"]
    np.testing.assert_array_equal(checkpoint.read("ccc"), [3, 3])
    checkpoint.release("ccc")
    with pytest.raises(CheckpointError, match="no tensor 'd'"):
        checkpoint.read("d")


def test_shards_may_be_links_as_in_the_hub_cache(sharded, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    for name in ("s1.safetensors", "s2.safetensors"):
        (sharded / name).rename(blobs / name)
        (sharded / name).symlink_to(blobs / name)
    assert len(Checkpoint(sharded).names()) == 3


def test_tensor_that_the_index_forgot_is_still_seen(sharded):
    index(sharded, {"a": "s1.safetensors", "ccc": "s2.safetensors"})
    assert "bb" in Checkpoint(sharded).names()


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "s3.safetensors"}, "s3.safetensors, not there"),
        ({"a": "../s1.safetensors"}, "not in its own folder"),
        ({"a": "/etc/s1.safetensors"}, "not in its own folder"),
        ({"a": "sub/s1.safetensors"}, "not in its own folder"),
        ({"a": "sub\\s1.safetensors"}, "not in its own folder"),
        ({"a": ".."}, "not in its own folder"),
        ({"a": ""}, "not in its own folder"),
        ({"a": "pytorch_model.bin"}, "not a .safetensors"),
        ({"a": 1}, "in 1, not a file"),
        ({"d": "s1.safetensors"}, "'d' in s1.safetensors, which does not hold it"),
        ({"ccc": "s1.safetensors", "a": "s2.safetensors"}, "does not hold it"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_malformed_index(sharded, weight_map, reason):
    index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "not a JSON object")],
)
def test_index_that_is_not_an_object(sharded, text, reason):
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint(sharded)


@pytest.mark.parametrize("of_index", ["s1.safetensors", "s2.safetensors"])
@pytest.mark.parametrize("first", ["a", "ccc"])
def test_a_tensor_in_two_shards_is_the_last_ones_by_name_as_in_transformers(
    sharded, of_index, first
):
    arrays = [("a", "F32", (2,), lambda: np.full(2, 9, np.float32))]
    write_safetensors(
        sharded / "s2.safetensors",
        [*arrays, ("ccc", "F32", (2,), lambda: np.full(2, 3, np.float32))],
    )
    places = {"a": of_index, "bb": "s1.safetensors", "ccc": "s2.safetensors"}
    index(sharded, {first: places[first]} | places)
    checkpoint = Checkpoint(sharded)
    assert sorted(checkpoint.names()) == ["a", "bb", "ccc"]
    np.testing.assert_array_equal(checkpoint.read("a"), [9, 9])
    np.testing.assert_array_equal(checkpoint.read("bb"), [2, 2])


LONG = "x" * 5000


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": f"{LONG}.safetensors"},
        {"a": LONG},
        {"a": f"../{LONG}.safetensors"},
        {"a": [LONG]},
        {LONG: "s1.safetensors"},
        {LONG: 1},
    ],
)
def test_long_names_are_shortened(sharded, weight_map):
    index(sharded, weight_map)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(sharded)
    assert len(str(caught.value)) < 400 + len(str(sharded))


def test_missing_and_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="is empty"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"needs model.safetensors or"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint(tmp_path / "config.json")
    write(tmp_path / "other.safetensors", "a")
    with pytest.raises(CheckpointError, match=r"only other.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / WEIGHTS_FILE).mkdir()
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_FILE} is not a file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.bin", "weights.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickle_is_rejected_by_name_with_the_command(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=rf"{name}.*python -P -c .*weights_only=True"
    ) as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_index_of_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index of pickle files.*python -P -c "):
        Checkpoint(tmp_path)
