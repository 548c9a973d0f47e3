"""Kinds of values that fields hold: a whole number in a range, a number, one of some words.

A kind checks a value in Python; argparse's and msgspec's types are made from it elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn, TypeGuard

from rooflax.errors import RequestError

SHOWN = 80
"""Characters of a wrong value that its error shows."""


def is_whole(value: object, of: type = Integral) -> TypeGuard[int]:
    """Whether it is a whole number; true and false are none.

    Args:
        of: `int` takes Python's only, the default NumPy's too.
    """
    return isinstance(value, of) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number that a float can hold; true and false are none."""
    if not is_whole(value, int) and not isinstance(value, float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def reject(name: str, value: object, wanted: str, *, what: str | None = None) -> NoReturn:
    """
    Args:
        what: the value is of the field `name`, if that is not its name.

    Raises:
        RequestError: always.
    """
    text = repr(value)
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    raise RequestError(f"{what or name} is {shown}; it must be {wanted}.", param=name)


class Kind:
    """Kind of a field's values; only kinds with fields are dataclasses, which take time to make.

    Attributes:
        repeats: several values make one, each given by a flag of its own.
        wanted: what values are, for errors.
    """

    repeats = False

    @property
    def range(self) -> str:
        """Range of the values as text; empty if the kind's name says it."""
        return ""

    @property
    def words(self) -> str:
        """Text behind the field's help."""
        return ""

    @property
    def wanted(self) -> str:
        return self.range

    def fits(self, value: Any) -> bool:
        """Whether the field may have the value."""
        raise NotImplementedError

    def read(self, name: str, value: Any, *, what: str | None = None) -> Any:
        """The value as the field keeps it.

        Raises:
            RequestError: it is of another kind, or out of range; the field is its `param`.
        """
        if not self.fits(value):
            reject(name, value, self.wanted, what=what)
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `low` to `high`, which None leaves open."""

    low: int = 0
    high: int | None = None

    @property
    def range(self) -> str:
        return f"from {self.low} " + ("up" if self.high is None else f"to {self.high}")

    @property
    def wanted(self) -> str:
        return f"a whole number {self.range}"

    def fits(self, value: Any) -> bool:
        high = math.inf if self.high is None else self.high
        return is_whole(value, int) and self.low <= value <= high


@dataclass(frozen=True)
class Number(Kind):
    """A finite number; with `above` or `below` the end itself is out of range."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    @property
    def range(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        high = f"{'below' if self.below else 'at most'} {self.high:g}"
        ends = [(low, self.low), (high, self.high)]
        return " and ".join(text for text, end in ends if math.isfinite(end))

    @property
    def wanted(self) -> str:
        return f"a finite number {self.range}".rstrip()

    def holds(self, value: float) -> bool:
        """Whether a number is in range."""
        is_end = (self.above and value == self.low) or (self.below and value == self.high)
        return self.low <= value <= self.high and not is_end

    def fits(self, value: Any) -> bool:
        return is_number(value) and self.holds(value)


class Flag(Kind):
    """True or false."""

    @property
    def wanted(self) -> str:
        return "true or false"

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Choice(Kind):
    """One of some values, most of them words."""

    choices: tuple[Any, ...]

    @property
    def words(self) -> str:
        *most, last = [str(choice).lower() for choice in self.choices]
        return f": {', '.join(most)} or {last}"

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(repr(choice) for choice in self.choices)}"

    def fits(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.choices)


class Text(Kind):
    """Any text; what it may be is checked where it is used."""

    @property
    def wanted(self) -> str:
        return "text"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)


class AnyValue(Text):
    """Text from a flag, in Python other values too; all are checked where they are used."""

    def fits(self, value: Any) -> bool:
        return True


@dataclass(frozen=True)
class Several(Kind):
    """Values of one kind, at most so many."""

    each: Kind
    most: int | None = None
    repeats = True

    @property
    def range(self) -> str:
        return "" if self.most is None else f"at most {self.most}"

    def read(self, name: str, value: Any, *, what: str | None = None) -> tuple[Any, ...]:
        items = tuple(self.each.read(name, item) for item in as_tuple(name, value))
        if self.most is not None and len(items) > self.most:
            entries = f"{name} has {len(items)} entries; at most {self.most} fit."
            raise RequestError(entries, param=name)
        return items


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list of any kind as a tuple; None is an empty one.

    Raises:
        RequestError: it is no list.
    """
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        reject(name, value, "a list")
    return tuple(value)
