"""Regular expressions that a checkpoint brings, for names of modules.

RE2 matches in a time that is linear in the name; Python's `re` backtracks, and a hostile pattern
takes longer than anybody waits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

from rooflax.errors import CheckpointError

LONGEST = 1024
MOST_PATTERNS = 1000


@lru_cache(4 * MOST_PATTERNS)
def compiled(text: str) -> Any:
    """A pattern with `match` and `fullmatch` as of Python's `re`.

    Raises:
        re2.error: RE2 does not know it.
    """
    options = re2.Options()
    options.log_errors = False
    return re2.compile(text, options)


def module_pattern(text: str, where: str) -> Any:
    """A pattern that a file has, compiled.

    Args:
        where: the file and the key, for errors.

    Raises:
        CheckpointError: it is too long, or no regular expression of RE2, which has no look-around
            and no references back.
    """
    if len(text) > LONGEST:
        raise CheckpointError(f"{where} has a pattern of {len(text)} characters.")
    try:
        return compiled(text)
    except (re2.error, UnicodeError) as error:
        raise CheckpointError(
            f"{where} has the pattern {text!r:.80}, which is no regular expression of RE2: "
            f"{_text(error)}."
        ) from None


def _text(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return (reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason))[:80]
