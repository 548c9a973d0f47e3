"""Training checkpoints: whole or absent, and exact.

A checkpoint is a folder `step-00000100` with `state.safetensors` (weights and optimizer, float32)
and `state.json` (step, settings, position in the log, checksum of the arrays). It is written under
another name, flushed to disk and renamed, so that whenever a run is killed the newest folder of
that name is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rooflax.errors import CheckpointError
from rooflax.files import open_regular, read_regular, sync_folder
from rooflax.loading.safetensors import SafetensorsFile, dtype_name, write_safetensors
from rooflax.train import job
from rooflax.train.step import TrainState

ARRAYS, STATE = "state.safetensors", "state.json"
_FINISHED = re.compile(r"step-(\d{8})")
_UNFINISHED = ".unfinished-"
CHUNK_BYTES = 1 << 20


def save_checkpoint(folder: Path, state: TrainState, info: dict[str, Any], *, keep: int) -> Path:
    """Writes the state of a step and removes older checkpoints.

    Args:
        folder: holds the run's checkpoints.
        info: what state.json shall hold beside the step; JSON values.
        keep: how many checkpoints stay, this one included.

    Raises:
        OSError: the disk is full or not writable; older checkpoints are untouched.
    """
    step = int(state.step)
    target = folder / checkpoint_name(step)
    temporary = folder / f"{_UNFINISHED}{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    try:
        temporary.mkdir()
        _write_arrays(temporary / ARRAYS, state)
        sums = {ARRAYS: crc32_of(temporary / ARRAYS)}
        about = {"step": step, **info, "crc32": sums}
        _write_synced(temporary / STATE, json.dumps(about, indent=2) + "\n")
        sync_folder(temporary)
        _remove(target)
        os.rename(temporary, target)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    others = [path for path in list_checkpoints(folder) if path != target]
    for old in others[: len(others) - (keep - 1)]:
        _remove(old)
    return target


def remove_checkpoints(folder: Path) -> None:
    """Clears away those of a run that is not gone on with."""
    for path in list_checkpoints(folder):
        _remove(path)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _FINISHED.fullmatch(path.name))


def remove_unfinished(folder: Path) -> None:
    """Clears away what a killed run left half written."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def read_about(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        CheckpointError: it is missing, not JSON, or does not say where the run stood.
    """
    info = _read_state(checkpoint)
    if not _states_all(info):
        raise CheckpointError(
            f"{checkpoint / STATE} does not state step, config, loss and log_position."
        )
    return info


def _read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    try:
        info = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return info if isinstance(info, dict) else {}


def _states_all(info: dict[str, Any]) -> bool:
    counts = all(type(info.get(k)) is int and info[k] >= 0 for k in ("step", "log_position"))
    loss = "loss" in info and (info["loss"] is None or type(info["loss"]) is float)
    return counts and loss and isinstance(info.get("config"), dict)


def crc32_of(path: Path) -> int:
    """Checksum of a file."""
    total = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total


def load_state(checkpoint: Path, like: TrainState) -> TrainState:
    """The state that `save_checkpoint` wrote, bit for bit.

    Args:
        like: a state of the same model and optimizer; gives structure, shapes and devices.

    Raises:
        CheckpointError: the arrays are damaged, or not those of `like`.
    """
    file = SafetensorsFile(checkpoint / ARRAYS)
    sums = _read_state(checkpoint).get("crc32")  # older versions state none
    if isinstance(sums, dict) and sums.get(ARRAYS) != crc32_of(checkpoint / ARRAYS):
        raise CheckpointError(f"{checkpoint / ARRAYS} is not what was saved: its checksum differs.")
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [_name(path) for path, _ in paths]
    if sorted(names) != sorted(file.names()):
        differ = sorted(set(names) ^ set(file.names()))
        raise CheckpointError(
            f"{checkpoint} belongs to another model or optimizer: {differ[0]} and "
            f"{len(differ) - 1} more are only on one side; train into another folder."
        )
    leaves = [_read(file, name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _read(file: SafetensorsFile, name: str, like: jax.Array) -> jax.Array:
    array = file.read(name)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise CheckpointError(
            f"{name} in {file.path} is {array.dtype}{list(array.shape)}, but this model needs "
            f"{like.dtype}{list(like.shape)}; train into another folder."
        )
    # A copy: the step donates the state, and the file's pages are not ours to give away.
    copied = jnp.array(np.array(array), copy=True)
    sharding = like.sharding
    return job.placed(copied, sharding) if isinstance(sharding, NamedSharding) else copied


def _write_arrays(path: Path, state: TrainState) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    write_safetensors(
        path,
        [
            (
                _name(where),
                dtype_name(leaf.dtype),
                leaf.shape,
                lambda leaf=leaf: np.asarray(leaf),
            )
            for where, leaf in leaves
        ],
        {"format": "rooflax-train"},
    )


def _remove(checkpoint: Path) -> None:
    if checkpoint.exists():
        # Renamed first: a checkpoint that is half removed must not look whole.
        doomed = checkpoint.with_name(f"{_UNFINISHED}{checkpoint.name}")
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
