"""Collecting documents: from a folder, from text and JSONL files.

A document is a name and a text. The order and the held-out split depend on names alone, so that
the same files give the same corpus on every machine. Nothing here knows tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rooflax.errors import RequestError
from rooflax.files import read_regular

SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "_bundled", ".git", ".venv", "node_modules",
})  # fmt: skip
HELD_OUT_FRACTION = 0.1
MAX_FILE_BYTES = 1 << 34
"""Of a training file; corpora are larger than what else is read into memory."""


@dataclass(frozen=True)
class Document:
    """A text and the relative path (or line) that names it."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8"))


def folder_documents(
    folder: Path, pattern: str = "*.py", *, skip: Iterable[str] = ()
) -> Iterator[Document]:
    """Every file below a folder that matches, sorted by relative path.

    Files that are empty or not UTF-8 are left out.

    Args:
        pattern: a glob for the file's name, such as "*.py".
        skip: names of further folders to leave out.

    Raises:
        RequestError: the folder does not exist.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give one that holds the training files.")
    left_out = SKIPPED_FOLDERS | set(skip)
    paths = (p.relative_to(folder) for p in folder.rglob(pattern) if p.is_file())
    kept = (p for p in paths if left_out.isdisjoint(p.parts[:-1]))
    for path in sorted(kept, key=lambda p: p.as_posix()):
        text = _read_text(folder / path)
        if text:
            yield Document(path.as_posix(), text)


def file_documents(paths: Sequence[Path], *, field: str = "text") -> Iterator[Document]:
    """Documents from files: each line of a .jsonl is one, any other file is one.

    Args:
        field: key of the text in a JSONL line.

    Raises:
        RequestError: a file is missing or not UTF-8, or a line is not an object with that key.
    """
    for path in paths:
        try:
            text = read_regular(path, MAX_FILE_BYTES).decode("utf-8")
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise RequestError(f"{path} is not UTF-8; convert it first.") from None
        if path.suffix == ".jsonl":
            yield from _jsonl_documents(path, text, field)
        elif text:
            yield Document(path.name, text)


def is_held_out(name: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a document is among the held-out fraction; decided by its name alone.

    A document of a smaller fraction also belongs to every larger one.
    """
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    tenths, rest = int.from_bytes(digest[:8], "big") % 10, int.from_bytes(digest[8:12], "big")
    return (tenths + rest / 2**32) / 10 < fraction


def split_held_out(
    documents: Iterable[Document], fraction: float = HELD_OUT_FRACTION
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, each in the given order."""
    training: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if is_held_out(document.name, fraction) else training).append(document)
    return training, held_out


def _read_text(path: Path) -> str | None:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _jsonl_documents(path: Path, text: str, field: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[field]
        except (ValueError, KeyError, TypeError, RecursionError):
            value = None
        if not isinstance(value, str) or not _is_unicode(value):
            raise RequestError(
                f"line {number} of {path} is not a JSON object with a string under {field!r}."
            )
        if value:
            yield Document(f"{path.name}:{number}", value)


def _is_unicode(text: str) -> bool:
    """False where JSON spelled half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
