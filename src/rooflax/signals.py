"""Ctrl-C that asks to stop, instead of breaking off in the middle of a step."""

from __future__ import annotations

import contextlib
import signal
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
