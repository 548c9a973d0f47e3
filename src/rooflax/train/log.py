"""The run's log: one JSON object per line, cut back to the checkpoint when a run resumes.

Numbers that must not depend on the machine's speed stand at the top of a line, everything that
does stands under "time", so that two runs can be compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.files import read_regular


class TrainLog:
    """Appends lines to a file.

    Args:
        path: the file.
        position: bytes to keep of it; what stands after them was never checkpointed.
        also: takes each line that is written.

    Raises:
        CheckpointError: the file is shorter than that.
    """

    def __init__(
        self, path: Path, position: int = 0, also: Callable[[dict[str, Any]], None] | None = None
    ):
        self._also = also
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115
        size = os.fstat(self._file.fileno()).st_size
        if size < position:
            self._file.close()
            raise CheckpointError(_short(path, size, position))
        self._file.truncate(position)
        self._file.seek(position)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        if self._also is not None:
            self._also(line)

    def position(self) -> int:
        """Bytes written so far, all of them on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NoLog(TrainLog):
    """The log of a process that does not write it."""

    def __init__(self) -> None:
        pass

    def write(self, line: dict[str, Any]) -> None:
        del line

    def close(self) -> None:
        pass


def best_held_out(lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The line of the lowest held-out loss that was taken on the way, the first of equal ones."""
    taken = [line for line in lines if line.get("whole") is False]
    return min(taken, key=lambda line: line["held_out_loss"], default=None)


def read_log(path: Path, position: int | None = None) -> list[dict[str, Any]]:
    """The lines of a log.

    Args:
        position: bytes that are read; None is all.

    Raises:
        CheckpointError: one is damaged, or the file is shorter or no regular one.
    """
    damaged = f"{path} is damaged; put it back or train into another folder."
    try:
        content = read_regular(path) if path.exists() or position is None else b""
        if position is not None and len(content) < position:
            raise CheckpointError(_short(path, len(content), position))
        lines = [json.loads(line) for line in content[:position].splitlines()]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(damaged) from None
    if not all(map(_is_line, lines)):
        raise CheckpointError(damaged)
    return lines


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    return "whole" not in line or isinstance(line.get("held_out_loss"), int | float)


def _short(path: Path, size: int, position: int) -> str:
    return (
        f"{path} has {size} bytes, but the checkpoint was made when it had {position}; put the log "
        f"back or train into another folder."
    )
