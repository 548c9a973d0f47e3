"""Regular expressions that a checkpoint brings, for names of modules.

Python's `re` backtracks: a hostile pattern takes longer than anybody waits. What is accepted takes
at most about as many steps as there are ways to place `MOST_REPEATS` cuts in a name, for each
choice of `MOST_OPTIONAL` parts.
"""

from __future__ import annotations

import re

from rooflax.errors import CheckpointError

LONGEST = 1024
MOST_REPEATS, MOST_OPTIONAL = 5, 6
TOKENS = re.compile(
    r"""(?P<open>\((?:\?(?:P<\w+>|<?[=!]|:|[a-zA-Z]+[:)]?))?)
    | (?P<close>\))
    | (?P<either>\|)
    | (?P<repeat>[*+]|\{\d*,?\d*\})
    | (?P<optional>\?)
    | (?P<back>\\[1-9])
    | \\. | \[\^?\]?(?:\\.|[^\]\\])*\] | .""",
    re.VERBOSE | re.DOTALL,
)


def module_pattern(text: str, where: str) -> re.Pattern[str]:
    """A pattern that a file has, compiled.

    Args:
        where: the file and the key, for errors.

    Raises:
        CheckpointError: it is no regular expression, or one that may take too long.
    """
    if len(text) > LONGEST:
        raise CheckpointError(f"{where} has a pattern of {len(text)} characters.")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise CheckpointError(
            f"{where} has the pattern {text!r:.80}, which is not a regular expression."
        ) from None
    if why := _slow(text):
        raise CheckpointError(f"{where} has the pattern {text!r:.80}, which {why}.")
    return pattern


def _slow(text: str) -> str | None:
    """Why a valid pattern may backtrack without end, or None."""
    repeats, optional = 0, 0
    closed, repeated = False, False  # what was read last: a group that varies, a repetition
    varies = [False]  # of each open group, whether it matches texts of several lengths or forms
    for token in TOKENS.finditer(text):
        kind, found = token.lastgroup, token[0]
        if kind == "close":
            closed, repeated = varies.pop(), False
            varies[-1] |= closed
            continue
        if kind == "open" and not found.endswith(")"):
            varies.append(False)
        elif kind == "back":
            return "refers back to a group"
        elif kind == "either":
            varies[-1] = True
        elif kind == "optional" and not repeated:  # behind a repetition it only makes it lazy
            optional += 1
            varies[-1] = True
        elif kind == "repeat":
            if closed:
                return "repeats a group that repeats or chooses itself"
            if found[0] in "*+" or "," in found:
                repeats += 1
                varies[-1] = True
        closed, repeated = False, kind == "repeat"
    if repeats > MOST_REPEATS:
        return f"repeats more than {MOST_REPEATS} parts"
    return f"has more than {MOST_OPTIONAL} optional parts" if optional > MOST_OPTIONAL else None
