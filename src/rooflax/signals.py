"""Signals that let work end in order: Ctrl-C that asks to stop, SIGTERM that cleans up."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def _handled(number: int, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """While inside, a signal has this handler; outside the main thread signals are someone else's,
    and stay so."""
    try:
        before = signal.signal(number, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        if before is not None:  # else it was not installed from Python
            signal.signal(number, before)


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

    with _handled(signal.SIGINT, ask):
        yield lambda: asked


INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """While inside, SIGINT ends the process with 130 and without a word.

    For imports: an exception in the middle of a native module's may crash or confuse it, and
    nothing is open yet. A handler of somebody else's stays.
    """

    def end(signum: int, frame: Any) -> None:
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with _handled(signal.SIGINT, end):
        yield


def keep_interrupts() -> None:
    """Raises a KeyboardInterrupt again that was raised in a callback, where Python drops it."""

    before = sys.unraisablehook

    def again(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again


TERMINATED = 128 + signal.SIGTERM


@contextlib.contextmanager
def cleanup_on_sigterm() -> Iterator[None]:
    """While inside, SIGTERM raises SystemExit(143), so that unfinished files are removed."""

    def end(signum: int, frame: Any) -> None:
        sys.exit(TERMINATED)

    with _handled(signal.SIGTERM, end):
        yield
