"""A checkpoint folder as one mapping from names to tensors: one file, or shards with an index.

It knows Hugging Face's file names and rejects pickle files. It does not know what the tensors
mean: names, shapes and types are checked against a model elsewhere.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.json_files import read_json_object
from rooflax.loading.safetensors import SafetensorsFile, TensorInfo, conversion_command

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin")


class Checkpoint:
    """The tensors of a checkpoint folder, memory-mapped; the interface of one `SafetensorsFile`.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises:
        CheckpointError: the folder is missing or has no safetensors, the index is malformed or
            names a shard that is missing or outside the folder, or a shard lacks a tensor that the
            index places there.

    A tensor in two shards is the last one's by name, as in transformers.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        _check_folder(self.folder)
        if (self.folder / WEIGHTS_FILE).exists():
            if not (self.folder / WEIGHTS_FILE).is_file():
                raise CheckpointError(
                    f"{self.folder / WEIGHTS_FILE} is not a file, it must be a safetensors file"
                )
            weight_map, shards = {}, [WEIGHTS_FILE]
        elif (self.folder / INDEX_FILE).exists():
            weight_map = read_index(self.folder / INDEX_FILE)
            shards = sorted(set(weight_map.values()))
        else:
            raise _no_weights(self.folder)
        self.files: list[SafetensorsFile] = []
        self._owner: dict[str, SafetensorsFile] = {}
        by_shard = {shard: self._add(shard) for shard in shards}
        for name, shard in weight_map.items():
            if name not in by_shard[shard]:
                raise CheckpointError(
                    f"{self.folder / INDEX_FILE} places the tensor {name!r:.80} in {shard:.80}, "
                    "which does not hold it"
                )
        self.metadata = self.files[0].metadata

    def _add(self, shard: str) -> set[str]:
        """The names of a shard's tensors, which lie over those of the shards before."""
        path = self.folder / shard
        if not os.path.isfile(path):  # false, unlike Path's, for a name that no file can have
            raise CheckpointError(
                f"{self.folder / INDEX_FILE} names the shard {shard:.80}, not there"
            )
        file = SafetensorsFile(path)
        self.files.append(file)
        self._owner |= dict.fromkeys(file.names(), file)
        return set(file.names())

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._owner:
            raise CheckpointError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return self._owner[name]

    def names(self) -> list[str]:
        """The names of all tensors, file by file."""
        return list(self._owner)

    def info(self, name: str) -> TensorInfo:
        """Type, shape and bytes of a tensor; CheckpointError if it is not there."""
        return self._file(name).info(name)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the map; CheckpointError if it is not there."""
        return self._file(name).read(name)

    def path(self, name: str) -> Path:
        """The file that holds a tensor; CheckpointError if it is not there."""
        return self._file(name).path

    def release(self, name: str) -> None:
        """Lets a tensor's pages go, so that what was read does not add up in memory."""
        self._file(name).release(name)

    def prefetch(self, name: str) -> None:
        """Has the system read a tensor's pages, without waiting for it."""
        self._file(name).prefetch(name)


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, give the folder of the checkpoint")
    if not any(folder.iterdir()):
        raise CheckpointError(f"the folder {folder} is empty, a checkpoint has {WEIGHTS_FILE}")


def read_index(path: Path) -> dict[str, str]:
    """The shard of each tensor.

    Raises:
        CheckpointError: the index is malformed, or names a file outside its folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{path} places the tensor {name!r:.80} in {shard!r:.80}, not a file"
            )
        _check_shard_name(path, shard)
    return weight_map


def _check_shard_name(index: Path, shard: str) -> None:
    # The hub's cache makes every file a link to ../../blobs, so the file may be a link; but the
    # name itself must not lead anywhere else.
    if shard in ("", ".", "..") or any(mark in shard for mark in "/\\\0:"):
        raise CheckpointError(f"{index} names the shard {shard!r:.80}, not in its own folder")
    if not shard.endswith(".safetensors"):
        raise CheckpointError(f"{index} names the shard {shard!r:.80}, which is not a .safetensors")


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [n for n in names if n.endswith(_PICKLE_SUFFIXES) and n not in _NOT_WEIGHTS]
    if pickles:
        sources = [folder / name for name in pickles]
        command = conversion_command(sources, folder / WEIGHTS_FILE)
        return CheckpointError(
            f"{folder} has only pickle files ({', '.join(pickles[:3])}), which can run code when "
            f"opened and are never read here, so convert them where torch is installed, with: "
            f"{command}"
        )
    indexes = [name for name in names if name.endswith(".bin.index.json")]
    if indexes:
        command = conversion_command(
            [f"{shlex.quote(str(folder))}/pytorch_model-*.bin"], folder / WEIGHTS_FILE
        )
        return CheckpointError(
            f"{folder} has {indexes[0]}, an index of pickle files, which are never read here, so "
            f"put those files next to it and convert them where torch is installed, with: {command}"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    present = f"only {', '.join(others[:3])}" if others else "none"
    return CheckpointError(f"{folder} needs {WEIGHTS_FILE} or {INDEX_FILE}, but has {present}")
