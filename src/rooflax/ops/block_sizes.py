"""Sizes of kernels' blocks: a rule's, or those measured to be faster.

While it is traced, a kernel asks `of` with the shape that it is given, its rule's sizes and others
that it could take. `MEASURED` answers where `benchmarks/block_sizes.py` found better ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Sizes = tuple[int, ...]
Shape = tuple[int | str, ...]
Key = tuple[str, Shape]
"""A kernel's name, and the shape that it is given."""

MEASURED: Mapping[Key, Sizes] = {}
"""No GPU or TPU has been measured yet."""


@dataclass(frozen=True)
class Question:
    """Question of a kernel: its name and the sizes that decide its blocks.

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
    """The sizes to take: a running trial's, else the measured ones, else the rule's.

    An answer that is no candidate is passed over.
    """
    others = tuple(dict.fromkeys(sizes for sizes in candidates if sizes != rule))
    question = Question(kernel, shape, rule, others)
    asked, trial = _asked.get(), _trial.get()
    if asked is not None and others:
        asked.setdefault(question.key, question)
    answer = (MEASURED if trial is None else trial).get(question.key, rule)
    return answer if answer in others else rule


def are_asked_for() -> bool:
    """Whether a trial or a recording is under way, which a program traced before would not see."""
    return _asked.get() is not None or _trial.get() is not None


def rounded_up(size: int) -> int:
    """The power of two that holds a size: sizes up to it share an answer."""
    return 1 << max(size - 1, 0).bit_length()


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


@contextmanager
def recording() -> Iterator[dict[Key, Question]]:
    """Collects the questions that have more than one answer, in the order they are asked."""
    questions: dict[Key, Question] = {}
    token = _asked.set(questions)
    try:
        yield questions
    finally:
        _asked.reset(token)


@contextmanager
def trying(answers: Mapping[Key, Sizes]) -> Iterator[None]:
    """Answers these questions as given, and any other by the rule."""
    token = _trial.set(answers)
    try:
        yield
    finally:
        _trial.reset(token)
