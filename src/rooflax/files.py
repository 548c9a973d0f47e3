"""Files that a user names: what is read is bounded, and a regular file unless it is text;
what is written has one writer.

Links stay links: what is replaced is the file that they lead to.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from rooflax.errors import CheckpointError, RequestError

if sys.platform != "win32":
    import fcntl

_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
MAX_BYTES, MAX_PIPE_BYTES, MAX_TEXT_BYTES = 1 << 32, 1 << 28, 1 << 26
"""Bytes of a file of requests or answers; of a pipe of them; of one line, or a single setting."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to read it; a pipe would wait for somebody who writes, a device has no end.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | _NO_WAITING | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_mapped(mapped: mmap.mmap, path: str | os.PathLike[str]) -> None:
    """Checks a mapped file before a read: beyond the end of one that was cut, the system would kill
    the process.

    Raises:
        CheckpointError: it is shorter than it was.
    """
    size = mapped.size()
    if size < len(mapped):
        raise CheckpointError(
            f"{os.fspath(path)} was cut from {len(mapped)} to {size} bytes while it was used; put "
            f"the whole file back, and start again."
        )


def reject_stand_in(path: str | os.PathLike[str], head: bytes) -> None:
    """Rejects what an incomplete download leaves in a file's place.

    Args:
        path: the file.
        head: its first bytes, 40 or more of them if it has as many.

    Raises:
        CheckpointError: it is empty, a Git LFS pointer or a web page.
    """
    text = head.lstrip()[:14].lower()
    if not head:
        reason = "is empty; download it again"
    elif head.startswith(b"version https://git-lfs"):
        reason = "is a Git LFS pointer in place of the file; `git lfs pull` in its folder gets it"
    elif text.startswith((b"<!doctype html", b"<html")):
        reason = "is a web page in place of the file; the hub's files are at /resolve/, not /blob/"
    else:
        return
    raise CheckpointError(f"{os.fspath(path)} {reason}.")


def read_regular(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular`, or it has more than `most` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:
        reason = f"it has {max(size, len(data))} bytes, and at most {most} are read"
        raise OSError(errno.EFBIG, reason, os.fspath(path))
    return data


def read_input(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The content of a regular file, of a pipe (as of `<(...)`), or of stdin, which is "-".

    Raises:
        OSError: as `read_regular`; or the pipe has no writer, which is not waited for.
    """
    is_stdin = path == "-"
    if not is_stdin and not stat.S_ISFIFO(os.stat(path).st_mode):
        return read_regular(path, most)
    most = min(most, MAX_PIPE_BYTES)
    if is_stdin:
        data = sys.stdin.buffer.read(most + 1)
    else:
        descriptor = os.open(path, os.O_RDONLY | _NO_WAITING)
        os.set_blocking(descriptor, True)
        with open(descriptor, "rb") as file:
            data = file.read(most + 1)
        if not data:
            raise OSError(errno.EINVAL, "nothing was written into the pipe", os.fspath(path))
    if len(data) > most:
        reason = f"it has more than {most} bytes, which are too many for a pipe"
        raise OSError(errno.EFBIG, reason, os.fspath(path))
    return data


def read_text(path: str | os.PathLike[str], most: int = MAX_TEXT_BYTES) -> str:
    """As `read_input`, as UTF-8 whose lines end with "\\n"."""
    text = read_input(path, most).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], encoding: str | None = None) -> Iterator[IO[Any]]:
    """A new file that takes the place of `path` once it is whole and on disk; of a link, the place
    of what it leads to.

    Args:
        encoding: of text; None takes bytes.
    """
    target = Path(os.path.realpath(path))
    # Opened by hand, not by tempfile: the result shall have the permissions of the umask.
    temporary = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        with open(temporary, "x" if encoding else "xb", encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in a folder durable; some file systems do not offer it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def only_writer(
    path: str | os.PathLike[str], lock: Path | None = None, *, makes_folders: bool = False
) -> Iterator[None]:
    """Locks a file or folder against other writers.

    The lock is the kernel's, so that it ends with the process, however that ends. There is none on
    Windows, on a file system without locks, and where the lock's file cannot be made.

    Args:
        path: what is written; a link counts as what it leads to.
        lock: the file to lock, which is removed in the end; None is `.NAME.lock` beside `path`.
        makes_folders: for the lock, as writing makes them; those that stay empty are removed.

    Raises:
        RequestError: somebody else writes it.
    """
    target = Path(os.path.realpath(path))
    file = lock or target.with_name(f".{target.name}.lock")
    made = [folder for folder in file.parents if not folder.exists()] if makes_folders else []
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            folder.mkdir(exist_ok=True)
    descriptor = None
    try:
        try:
            descriptor = _locked(file)
        except BlockingIOError:
            raise RequestError(
                f"{path} is being written by another process; wait for its end, or name another."
            ) from None
        yield
    finally:
        with contextlib.suppress(OSError):  # a signal may come between making the file and here
            descriptor = _locked(file) if descriptor is None else descriptor
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(file)
            os.close(descriptor)
        with contextlib.suppress(OSError):  # something was written
            for folder in made:
                folder.rmdir()


def _locked(file: Path) -> int | None:
    """The descriptor of a file with a lock on it; None where there are no locks.

    Raises:
        BlockingIOError: somebody else has the lock.
    """
    if sys.platform == "win32":
        return None
    while True:
        with contextlib.ExitStack() as opened:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | _NO_WAITING
                descriptor = os.open(file, flags, 0o666)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # of the folder or the file system; writing says what is wrong
                return None
            with contextlib.suppress(FileNotFoundError):  # who had it has removed it
                if os.path.samestat(os.fstat(descriptor), os.lstat(file)):
                    opened.pop_all()
                    return descriptor
