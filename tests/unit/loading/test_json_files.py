"""The small files of a checkpoint folder: what is no regular file, too large, or no JSON object."""

import os

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import json_files
from rooflax.loading.checkpoint import INDEX_FILE, Checkpoint
from rooflax.loading.generation_config import read_generation_defaults
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.model_info import model_info
from rooflax.loading.pooling import read_pooling
from rooflax.loading.safetensors import SafetensorsFile
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


STAND_INS = {
    "empty": (b"", "is empty; download it again"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2471645600\n",
        "is a Git LFS pointer .* `git lfs pull`",
    ),
    "a web page": (b"\n<!DOCTYPE html>\n<html><head>", "is a web page .* /resolve/"),
}
DOWNLOADS = {
    **READERS,
    "tokenizer.json": Tokenizer,
    "model.safetensors": lambda folder: SafetensorsFile(folder / "model.safetensors"),
    "model.gguf": lambda folder: GGUFFile(folder / "model.gguf"),
}


@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.parametrize("name", DOWNLOADS)
def test_what_a_failed_download_leaves_is_said_with_its_remedy(tmp_path, name, kind):
    content, sentence = STAND_INS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} {sentence}"):
        DOWNLOADS[name](tmp_path)


def test_the_folder_of_a_training_run_names_what_it_holds(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="base model of the adapter .*/adapter, and give"):
        model_info(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="name .*/model, which has one"):
        model_info(tmp_path)
