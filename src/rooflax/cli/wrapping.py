"""Breaking lines between words while a text streams to a terminal."""

from __future__ import annotations

import os
import sys
import unicodedata

MIN_COLUMNS = 20
"""A narrower terminal breaks lines itself."""
TAB = 8


class LineWrapper:
    """Adds line breaks to text that comes in pieces.

    A word is written at once; where it turns out not to fit, it is erased and written again on the
    next line. What has no spaces (a long path, Chinese) breaks at the edge.

    Args:
        columns: of the terminal; None asks it at every piece.
    """

    def __init__(self, columns: int | None = None):
        self._columns = columns
        self._column, self._word = 0, ""
        """Columns in use, and the word at their end."""

    def __call__(self, text: str) -> str:
        """Text to write for the next piece, which has no control characters but \\n and \\t."""
        columns = self._columns or _terminal_columns()
        if columns < MIN_COLUMNS:
            return text
        return "".join(self._placed(character, columns - 1) for character in text)

    def _placed(self, character: str, most: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        size = TAB - self._column % TAB if character == "\t" else width(character)
        fits = self._column + size <= most
        if character.isspace():
            self._word = ""
            if not fits:
                self._column = 0
                return "\n"
        elif not fits:
            return self._moved(character, size)
        elif size > 1:  # a line may break before and after a wide character
            self._word = ""
        else:
            self._word += character
        self._column += size
        return character

    def _moved(self, character: str, size: int) -> str:
        """The last word and the character that no longer fits, on a new line."""
        word, held = self._word, sum(map(width, self._word))
        if size > 1 or held in (0, self._column):
            self._column, self._word = size, "" if size > 1 else character
            return "\n" + character
        self._column, self._word = held + size, word + character
        return f"\033[{held}D\033[K\n{self._word}"


def width(character: str) -> int:
    """Columns that a terminal gives a character."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _terminal_columns() -> int:
    """Width of stdout in columns; 0 if it cannot erase or is no terminal."""
    if os.environ.get("TERM") in (None, "", "dumb"):
        return 0
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0
