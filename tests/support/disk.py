"""Faults of a disk: the k-th touch of a folder fails, or is the last thing that a process does."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FULL = OSError(errno.ENOSPC, "No space left on device")
CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "truncate")


class Killed(BaseException):
    """A process is gone: nothing that it does later reaches the disk."""


class Disk:
    """Counts what is done to a folder: opens for writing, writes, flushes, renames, removals.

    Args:
        fail_at: the touch, from 1 on, that raises `error`; None lets all through. A write that
            fails has written half, as on a full disk. After `Killed` each later touch raises it
            again, so that no clean-up is done.
        spared: the name of a file that does not count.

    Attributes:
        calls: their names, in order.
    """

    def __init__(
        self,
        folder: Path,
        fail_at: int | None = None,
        error: BaseException = FULL,
        *,
        spared: str = "",
    ):
        self.folder, self.fail_at, self.error = os.path.realpath(folder), fail_at, error
        self.spared = spared
        self.calls: list[str] = []

    @property
    def has_failed(self) -> bool:
        return self.fail_at is not None and len(self.calls) >= self.fail_at

    def touch(self, name: str) -> None:
        self.calls.append(name)
        is_due = len(self.calls) == self.fail_at
        if is_due or (self.has_failed and isinstance(self.error, Killed)):
            raise self.error

    def holds(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        where = os.path.abspath(os.fsdecode(path))
        name = os.path.basename(where)  # a lock is the kernel's, and ends with its process
        is_one = name != self.spared and not name.endswith(".lock")
        return is_one and where.startswith(self.folder + os.sep)

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        """Counts, and fails, until the block ends."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(os, "fsync", self._flushed(os.fsync))
            patch.setattr(shutil, "rmtree", self._removed(shutil.rmtree))
            opens = self._opened(builtins.open)
            patch.setattr(builtins, "open", opens)
            patch.setattr(io, "open", opens)
            yield self

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.holds(path):
                self.touch(name)
            return real(path, *args, **kwargs)

        return call

    def _flushed(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            if self.holds(os.readlink(f"/proc/self/fd/{descriptor}")):
                self.touch("fsync")
            real(descriptor)

        return fsync

    def _removed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A folder is removed file by file, the first of them before the touch that may fail."""

        def rmtree(path: Any, ignore_errors: bool = False, **kwargs: Any) -> None:
            is_due = self.fail_at is not None and len(self.calls) + 1 == self.fail_at
            if self.holds(path) and os.path.isdir(path):
                if is_due:
                    for first in sorted(Path(path).iterdir())[:1]:
                        if first.is_file():
                            first.unlink()
                try:
                    self.touch("rmtree")
                except OSError:
                    if not ignore_errors:
                        raise
                    return
            real(path, ignore_errors=ignore_errors, **kwargs)

        return rmtree

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = bool(set(mode) & set("wax+"))
            if not writes or isinstance(file, int) or not self.holds(file):
                return real(file, mode, *args, **kwargs)
            self.touch("open")
            return _File(real(file, mode, *args, **kwargs), self)

        return opens


class _File:
    def __init__(self, file: Any, disk: Disk):
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._disk.touch("write")
        return half + self._file.write(data[half:])

    def truncate(self, *size: int) -> int:
        self._disk.touch("truncate")
        return self._file.truncate(*size)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def touches(folder: Path, act: Callable[[], Any]) -> list[str]:
    """What an act does to a folder, in order."""
    with Disk(folder).watched() as disk:
        act()
    return disk.calls
