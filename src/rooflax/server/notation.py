"""Calls whose arguments are not JSON: `f(a=1, b="x")`, and `call:f{a:1,b:<q>x<q>}`.

Reads each text once, from left to right, without running any of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[^\s:=,{}\[\]()\"']{1,256}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_NOTABLE = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


class Notation(NamedTuple):
    """Notation of arguments.

    Attributes:
        quote: around texts, which then have no escapes; "" is quotes and escapes as in Python.
        open, close: around all arguments.
        assign, pair: between a name and its value, among the arguments and within an object.
        comma: between two of them.
        words: what true, false and null are.
    """

    quote: str
    open: str
    close: str
    assign: str
    pair: str
    comma: str
    words: tuple[str, str, str]


PYTHON = Notation("", "(", ")", "=", ": ", ", ", ("True", "False", "None"))


def gemma(quote: str) -> Notation:
    """`{a:1,b:<q>x<q>}`."""
    return Notation(quote, "{", "}", ":", ":", ",", ("true", "false", "null"))


class NoNotation(Exception):
    """The text is something else."""


class Scanner:
    """Reads values of one notation.

    Raises:
        NoNotation: from every method, where the text is something else.
    """

    def __init__(self, text: str, notation: Notation):
        self.text, self.notation, self.at = text, notation, 0

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def take(self, wanted: str) -> bool:
        """Whether this comes next; it is behind us then."""
        self.skip()
        comes = self.text.startswith(wanted, self.at)
        self.at += len(wanted) if comes else 0
        return comes

    def want(self, wanted: str) -> None:
        if not self.take(wanted):
            raise NoNotation

    def match(self, pattern: re.Pattern[str]) -> str:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise NoNotation
        self.at = match.end()
        return match[0]

    @property
    def is_at_end(self) -> bool:
        self.skip()
        return self.at == len(self.text)

    def name(self) -> str:
        return self.match(_NAME)

    def arguments(self) -> dict[str, Any]:
        """All of a call's."""
        notation = self.notation
        self.want(notation.open)
        return self._pairs(notation.close, notation.assign.strip(), 1)

    def _pairs(self, close: str, assign: str, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}

        def pair() -> None:
            key = self._text() if self._quote() else self.match(_KEY)
            self.want(assign)
            pairs[key] = self.value(depth)

        self.several(close, pair)
        return pairs

    def several(self, close: str, one: Callable[[], Any]) -> None:
        """Reads items between commas, up to `close`."""
        if self.take(close):
            return
        while True:
            one()
            if self.take(close):
                return
            self.want(",")
            if self.take(close):  # a comma too many
                return

    def value(self, depth: int = 0) -> Any:
        """The next value."""
        if depth > MAX_DEPTH:
            raise NoNotation
        if self._quote():
            return self._text()
        if self.take("{"):
            return self._pairs("}", ":", depth + 1)
        if self.take("["):
            items: list[Any] = []
            self.several("]", lambda: items.append(self.value(depth + 1)))
            return items
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            whole = number[0].lstrip("-").isdigit()
            return int(number[0]) if whole and len(number[0]) < 400 else float(number[0])
        word = self.match(_WORD)
        if word not in _WORDS:
            raise NoNotation
        return _WORDS[word]

    def _quote(self) -> str:
        """Opening quote at this place; "" if there is none."""
        self.skip()
        for quote in (self.notation.quote,) if self.notation.quote else ('"', "'"):
            if self.text.startswith(quote, self.at):
                return quote
        return ""

    def _text(self) -> str:
        quote = self._quote()
        self.at += len(quote)
        if self.notation.quote:
            end = self.text.find(quote, self.at)
            if end < 0:
                raise NoNotation
            inside, self.at = self.text[self.at : end], end + len(quote)
            return inside
        parts: list[str] = []
        while (notable := _NOTABLE[quote].search(self.text, self.at)) is not None:
            parts.append(self.text[self.at : notable.start()])
            self.at = notable.end()
            if notable[0] == quote:
                text = "".join(parts)
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            parts.append(self._escape())
        raise NoNotation

    def _escape(self) -> str:
        sign = self.text[self.at : self.at + 1]
        self.at += 1
        size = {"x": 2, "u": 4, "U": 8}.get(sign)
        if size is None:
            return _ESCAPES.get(sign, sign)
        digits = self.text[self.at : self.at + size]
        self.at += size
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise NoNotation from None
