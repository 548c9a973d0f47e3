"""Cutting a long text into windows so that every token is scored exactly once. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

from rooflax.errors import RequestError


class Window(NamedTuple):
    """Tokens [start, end) are run; of those, [first, end) are scored, each given what is before."""

    start: int
    end: int
    first: int


def windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """Windows of at most `length` tokens, each beginning `stride` after the one before.

    Every token but the very first, which has nothing before it, is scored in exactly one window,
    and (but in the first window) with at least length - stride tokens before it.

    Raises:
        RequestError: a length below 2, or a stride that is not from 1 to length - 1.
    """
    if length < 2:
        raise RequestError(f"the window has {length} tokens; scoring needs at least 2.")
    if not 1 <= stride < length:
        raise RequestError(
            f"--stride is {stride}; with windows of {length} it must be 1 to {length - 1}."
        )
    cut: list[Window] = []
    first = 1
    for start in range(0, num_tokens, stride):
        end = min(start + length, num_tokens)
        if first < end:
            cut.append(Window(start, end, first))
        first = max(first, end)
        if end == num_tokens:
            break
    return cut
