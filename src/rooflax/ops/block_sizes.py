"""Sizes of kernels' blocks: what a rule says, or what was measured to be faster on this device.

While it is traced, a kernel asks `of` with the shape that it is given, its rule's sizes and others
that it could take. `rooflax tune` records what a model's programs ask, tries the candidates, and
keeps what beat the rule in a table, one file per kind of device in the user's cache folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rooflax.errors import RequestError
from rooflax.folders import cache_folder

Sizes = tuple[int, ...]
Shape = tuple[int | str, ...]
Key = tuple[str, Shape]
"""A kernel's name, and the shape that it is given."""


@dataclass(frozen=True)
class Question:
    """What a kernel asks.

    Attributes:
        kernel: its name.
        shape: all that the best sizes may depend on.
        rule: the sizes where nothing was measured.
        others: sizes that the kernel could take instead.
    """

    kernel: str
    shape: Shape
    rule: Sizes
    others: tuple[Sizes, ...]

    @property
    def key(self) -> Key:
        return self.kernel, self.shape


_asked: ContextVar[dict[Key, Question] | None] = ContextVar("asked", default=None)
_trial: ContextVar[Mapping[Key, Sizes] | None] = ContextVar("trial", default=None)


def of(kernel: str, shape: Shape, rule: Sizes, candidates: Sequence[Sizes]) -> Sizes:
    """The sizes to take: a running trial's, else the table's, else the rule's.

    An answer that is no candidate (of another version, or for a neighbouring shape) is passed over.

    Raises:
        RequestError: the table cannot be read.
    """
    others = tuple(dict.fromkeys(sizes for sizes in candidates if sizes != rule))
    question = Question(kernel, shape, rule, others)
    asked, trial = _asked.get(), _trial.get()
    if asked is not None and others:
        asked.setdefault(question.key, question)
    answers = _tuned() if trial is None else trial
    answer = answers.get(question.key, rule)
    return answer if answer in others else rule


def about(size: int) -> int:
    """The power of two that holds a size: sizes up to it share an answer."""
    return 1 << max(size - 1, 0).bit_length()


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


@contextmanager
def recording() -> Iterator[dict[Key, Question]]:
    """Collects the questions that have more than one answer, in the order they are asked."""
    asked: dict[Key, Question] = {}
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


@contextmanager
def trying(answers: Mapping[Key, Sizes]) -> Iterator[None]:
    """These answers, and the rule's to any other question: the table is not read."""
    token = _trial.set(answers)
    try:
        yield
    finally:
        _trial.reset(token)


def table_path() -> Path:
    """The table of this kind of device."""
    kind = re.sub(r"[^\w.-]+", "-", jax.devices()[0].device_kind)
    return cache_folder() / "block_sizes" / f"{kind}.json"


def table() -> dict[Key, Sizes]:
    """What is kept for this kind of device.

    Raises:
        RequestError: the file is no table.
    """
    path = table_path()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return dict(_entry(raw) for raw in document["block_sizes"])
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError, TypeError, KeyError):
        reason = "it is no table of block sizes"
    raise RequestError(
        f"The tuned block sizes in {path} cannot be read: {reason}; delete the file, or measure "
        f"anew with rooflax tune."
    )


def keep(found: Mapping[Key, Sizes | None]) -> Path:
    """Writes answers into the table, which keeps those of other shapes; None forgets one.

    A file that is no table is replaced.

    Returns:
        Where it is.

    Raises:
        OSError: it cannot be written.
    """
    try:
        entries: dict[Key, Sizes | None] = {**table()}
    except RequestError:
        entries = {}
    entries |= found
    rows = [
        {"kernel": kernel, "shape": shape, "sizes": sizes}
        for (kernel, shape), sizes in entries.items()
        if sizes is not None
    ]
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(_lines(rows), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _read_once.cache_clear()
    return path


def _tuned() -> Mapping[Key, Sizes]:
    """The table, read once; without one where several processes must make the same program."""
    return {} if jax.process_count() > 1 else _read_once(table_path())


@functools.cache
def _read_once(path: Path) -> Mapping[Key, Sizes]:
    return table()


def _entry(raw: Any) -> tuple[Key, Sizes]:
    """
    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    kernel, shape, sizes = raw["kernel"], tuple(raw["shape"]), tuple(raw["sizes"])
    if not isinstance(kernel, str) or not all(type(s) in (int, str) for s in shape):
        raise ValueError(kernel)
    if not all(type(size) is int for size in sizes):
        raise ValueError(sizes)
    return (kernel, shape), sizes


def _lines(rows: list[dict[str, Any]]) -> str:
    """The document, an entry a line."""
    entries = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"block_sizes": [\n{entries}\n]}}\n'
