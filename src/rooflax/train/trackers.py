"""Sends a run's log to TensorBoard, Weights & Biases or Trackio, which only this module imports."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rooflax.errors import RequestError, first_line
from rooflax.fields.kinds import is_number

TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "trackio")
"""Extras of the same names install them."""
PACKAGES = {TENSORBOARD: "tensorboardX"}
APART = ("step", "whole", "samples", "settings")
Write = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def tracking(name: str | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Write]:
    """Yields what takes each line of the log, until the run ends.

    Args:
        name: one of `TRACKERS`, or None for nobody.
        folder: of the run: TensorBoard's files are in it, others get its name.
        settings: of the run.

    Raises:
        RequestError: it is not installed, or does not start.
    """
    if name is None:
        yield lambda line: None
        return
    start = _tensorboard if name == TENSORBOARD else _started
    with start(tracker_module(name), name, folder, settings) as send:
        yield lambda line: send(metrics(line), line["step"])


def tracker_module(name: str) -> Any:
    """The package of one of `TRACKERS`.

    Raises:
        RequestError: it is not installed.
    """
    package = PACKAGES.get(name, name)
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RequestError(
            f"--report-to {name} needs the package {package}; say `pip install {package}`."
        ) from None


def metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's numbers under train/ or, of held-out rows, eval/, as transformers' Trainer says."""
    prefix = "eval" if "held_out_loss" in line else "train"
    flat = {**line, **line.get("time", {})}
    flat = {name.removeprefix("held_out_"): flat[name] for name in flat if name not in APART}
    return {f"{prefix}/{name}": value for name, value in flat.items() if is_number(value)}


Send = Callable[[dict[str, float], int], None]


@contextlib.contextmanager
def _tensorboard(
    module: Any, name: str, folder: Path, settings: Mapping[str, Any]
) -> Iterator[Send]:
    with contextlib.ExitStack() as stack:
        writers: list[Any] = []

        def send(values: dict[str, float], step: int) -> None:
            if values and not writers:  # what a run that was killed had sent from here on is gone
                writers.append(module.SummaryWriter(str(folder / name), purge_step=step))
                stack.callback(writers[0].close)
            for key, value in values.items():
                writers[0].add_scalar(key, value, step)

        yield send


@contextlib.contextmanager
def _started(module: Any, name: str, folder: Path, settings: Mapping[str, Any]) -> Iterator[Send]:
    os.environ.setdefault("WANDB_DIR", str(folder))
    project = os.environ.get(f"{name.upper()}_PROJECT", "rooflax")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's own
        try:
            module.init(project=project, name=folder.resolve().name, config=dict(settings))
        except Exception as error:
            raise RequestError(f"{name} does not start: {first_line(error).rstrip('.')}.") from None
        try:
            yield lambda values, step: module.log(values, step=step) if values else None
        finally:
            module.finish()
