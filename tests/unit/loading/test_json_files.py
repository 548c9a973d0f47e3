"""The small files of a checkpoint folder: what is no regular file, too large, or no JSON object."""

import os

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import json_files
from rooflax.loading.checkpoint import INDEX_FILE, Checkpoint
from rooflax.loading.generation_config import read_generation_defaults
from rooflax.loading.model_info import model_info
from rooflax.loading.pooling import read_pooling
from rooflax.loading.tokenizer import Tokenizer

READERS = {
    "config.json": model_info,
    "generation_config.json": read_generation_defaults,
    INDEX_FILE: Checkpoint,
    "modules.json": lambda folder: read_pooling(folder, 8, 8),
    "tokenizer_config.json": Tokenizer,
}


def _make(path, kind):
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "large":
            with path.open("wb") as file:
                file.truncate(json_files.MAX_FILE_BYTES + 1)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
@pytest.mark.parametrize("name", list(READERS))
def test_a_file_that_cannot_be_read_whole_is_rejected_by_name(tmp_path, name, kind):
    _make(tmp_path / name, kind)
    with pytest.raises(CheckpointError, match=rf"{name}.*(not a regular file|bytes|directory)"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
def test_a_tokenizer_that_cannot_be_read_whole(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(
        "rooflax.loading.tokenizer_folder.MAX_TOKENIZER_BYTES", json_files.MAX_FILE_BYTES
    )
    _make(tmp_path / "tokenizer.json", kind)
    with pytest.raises(CheckpointError, match=r"tokenizer"):
        Tokenizer(tmp_path)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert json_files.read_json_object(tmp_path / "config.json") == {"a": 1}
    assert json_files.read_json_object(tmp_path / "none.json") == {}
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert json_files.read_json_object(tmp_path / "gone.json") == {}
