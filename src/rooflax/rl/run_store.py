"""Saved training runs in a folder: each is an adapter that PEFT opens, with or without the
optimizer's state, under the name that Tinker's API gives it.

`tinker://RUN/weights/NAME` lies in `RUN/weights/NAME`, with `-` in place of the colons of RUN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rooflax.errors import CheckpointError, RequestError
from rooflax.files import only_writer
from rooflax.loading.adapters import open_adapter, save_adapter
from rooflax.loading.json_files import read_json_object
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.save import replace_folder
from rooflax.models.adapters import LowRank, adapted
from rooflax.models.model import Model
from rooflax.rl.runs import LoraShape, Run, fresh_state
from rooflax.train.checkpoint import list_checkpoints, load_state, save_checkpoint

WEIGHTS, SAMPLER = "weights", "sampler_weights"
"""Kinds of what is saved: with the optimizer's state, and without."""
ABOUT, STATE = "run.json", "state"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_PATH = re.compile(rf"tinker://({_NAME}(?::{_NAME}){{0,3}})/({WEIGHTS}|{SAMPLER})/({_NAME})")


class RunStore:
    """The folder of saved runs.

    Args:
        root: is made when something is saved.
        info: the model that the runs' adapters are for.
    """

    def __init__(self, root: Path, info: ModelInfo):
        self._root, self._info = root, info

    def save(self, run: Run, run_id: str, kind: str, name: str, *, overwrites: bool) -> str:
        """Writes a run as it is now, all or nothing; its path.

        Raises:
            RequestError: the name is no file's name, or taken.
            OSError: the disk is full, or the folder cannot be written.
        """
        path = f"tinker://{run_id}/{kind}/{name}"
        folder = self._folder(path)
        with only_writer(folder, makes_folders=True):
            if folder.exists() and not overwrites:
                raise RequestError(f"{path} exists; take another name, or overwrite it.")
            replace_folder(folder, lambda new: self._write(new, run, kind))
        return path

    def _write(self, folder: Path, run: Run, kind: str) -> None:
        info, weights = self._info, run.state.weights
        save_adapter(
            folder,
            run.lora.adapters(weights),
            run.lora.config,
            name=info.family,
            model=info.config,
            base=info.name,
        )
        (folder / ABOUT).write_text(json.dumps(asdict(run.shape), indent=2) + "\n", "utf-8")
        if kind == WEIGHTS:
            save_checkpoint(folder / STATE, run.state, {}, keep=1)

    def run(self, path: str, base: Model, *, has_optimizer: bool) -> Run:
        """A new run that begins as the saved one was.

        Args:
            has_optimizer: its optimizer goes on; else it begins anew.

        Raises:
            RequestError: nothing of that path is there, or it has no optimizer's state.
            CheckpointError: it is damaged, or of another model.
        """
        folder = self._existing(path)
        run = Run(base, _shape(folder))
        if has_optimizer:
            checkpoints = list_checkpoints(folder / STATE)
            if not checkpoints:
                raise RequestError(f"{path} has no optimizer's state; load its weights alone.")
            run.state = load_state(checkpoints[-1], run.state)
            return run
        matrices = {
            module: {"a": jnp.asarray(part.a), "b": jnp.asarray(part.b)}
            for module, part in self._adapters(folder).items()
        }
        if matrices.keys() != run.state.weights.keys():
            raise CheckpointError(f"{folder} has other layers than its {ABOUT} says.")
        run.state = fresh_state(matrices)
        return run

    def sampler(self, path: str, base: Model) -> Model:
        """The model with a saved adapter, for the engine.

        Raises:
            RequestError, CheckpointError: as `run`.
        """
        return adapted(base, self._adapters(self._existing(path)))

    def _adapters(self, folder: Path) -> Mapping[str, LowRank]:
        return open_adapter(folder, self._info).read(self._info)

    def _existing(self, path: str) -> Path:
        folder = self._folder(path)
        if not folder.is_dir():
            raise RequestError(f"{path} is not there; nothing was saved under that name.")
        return folder

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise RequestError(
                f"{path!r:.200} is no path of saved weights: tinker://RUN/weights/NAME, with "
                f"letters, digits, and . _ - in its names."
            )
        run, kind, name = match.groups()
        return self._root / run.replace(":", "-") / kind / name


def _shape(folder: Path) -> LoraShape:
    """Contents of a saved run's run.json."""
    raw: Mapping[str, Any] = read_json_object(folder / ABOUT)
    known = asdict(LoraShape(rank=1))
    if raw.keys() != known.keys() or any(type(raw[k]) is not type(v) for k, v in known.items()):
        raise CheckpointError(f"{folder / ABOUT} does not say what the run trains.")
    return LoraShape(**raw)
