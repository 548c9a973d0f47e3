"""Signals that let work end in order: Ctrl-C that asks to stop, SIGTERM that cleans up."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """While inside, the first SIGINT only asks to stop; a second one interrupts as usual.

    Yields:
        A function that says whether it was asked.
    """
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: signals are someone else's
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def cleanup_on_sigterm() -> Iterator[None]:
    """While inside, SIGTERM raises SystemExit(143), so that unfinished files are removed."""

    def end(signum: int, frame: Any) -> None:
        sys.exit(TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: signals are someone else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
