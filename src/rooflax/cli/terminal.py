"""Terminal manners: what goes where, progress only for people, text that cannot move the cursor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rooflax.errors import RequestError
from rooflax.files import read_input

SILENT_S = 3
"""A status that stands longer says its seconds."""
DIM, PLAIN, CLEAR_LINE = "\033[2m", "\033[0m", "\r\033[K"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def say(line: str = "", *, is_faint: bool = False) -> None:
    """A line for people, on stderr, without control characters; above the status that stands."""
    line = harmless(line)
    with _status.hidden():
        _to_stderr((dim(line, sys.stderr) if is_faint else line) + "\n")


def say_wrapped(text: str, *, is_faint: bool = False) -> None:
    """The same, broken between words at the terminal's edge."""
    for line in textwrap.wrap(text, shutil.get_terminal_size().columns):
        say(line, is_faint=is_faint)


def write_faint(text: str) -> None:
    """Text to stderr at once, in faint letters on a terminal."""
    _to_stderr(dim(harmless(text), sys.stderr))


def _to_stderr(text: str) -> None:
    """Writes for people who may be gone: where stderr is broken, what follows goes nowhere."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        let_go_of(sys.stderr)


def let_go_of(stream: Any) -> None:
    """Points a broken stream at nothing, so that no later write or flush of it fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def keys_hidden() -> Iterator[None]:
    """While inside, what is typed waits for the next question and does not show in the answer."""
    if not is_terminal(sys.stdin) or sys.platform == "win32":
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def write(text: str, wrap: Callable[[str], str] = str) -> None:
    """Text of a model to stdout at once; on a terminal, control characters are shown as ?.

    What the terminal's encoding lacks becomes ?, so that a text never ends in an error.

    Args:
        wrap: breaks its lines, on a terminal only.
    """
    out = sys.stdout
    if is_terminal(out):
        text = wrap(harmless(text))
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))
    out.flush()


def harmless(text: str) -> str:
    """Text without what could move a cursor or recolour a terminal, or is no Unicode."""
    return _CONTROL.sub("?", text)


def dim(text: str, stream: Any) -> str:
    """Text in faint letters where `stream` is a terminal."""
    return f"{DIM}{text}{PLAIN}" if is_terminal(stream) and text else text


def print_json(document: Any) -> None:
    """The one JSON document of a command."""
    print(json_text(document, indent=2, allow_nan=False))


def json_text(document: Any, **options: Any) -> str:
    """JSON in which only lone surrogates, which UTF-8 does not have, are escaped."""
    text = json.dumps(document, ensure_ascii=False, **options)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class _Status:
    """A dim status line on stderr: the current step, and after SILENT_S its seconds.

    Several may be under way, one within another; the innermost is shown.
    """

    def __init__(self) -> None:
        self._texts: list[tuple[str, float]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[str], None]]:
        """Yields a function that sets the status; the line is removed at the end."""
        done = threading.Event()
        with self._lock:
            self._erase()
            self._texts.append(("", 0.0))
            place = len(self._texts) - 1

        def say(text: str) -> None:
            with self._lock:
                self._texts[place] = (text, time.monotonic())
                self._draw()

        def tick() -> None:
            while not done.wait(1):
                with self._lock:
                    if not done.is_set() and place == len(self._texts) - 1:
                        self._draw()

        threading.Thread(target=tick, daemon=True).start()
        try:
            yield say
        finally:
            with self._lock:
                done.set()
                self._erase()
                del self._texts[place:]
                self._draw()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """While a line is written in its place."""
        with self._lock:
            self._erase()
            yield
            self._draw()

    def _erase(self) -> None:
        if self._texts and self._texts[-1][0]:
            _to_stderr(CLEAR_LINE)

    def _draw(self) -> None:
        text, since = self._texts[-1] if self._texts else ("", 0.0)
        if text:
            spent = time.monotonic() - since
            seconds = f" {spent:.0f} s" if spent >= SILENT_S else ""
            _to_stderr(f"{CLEAR_LINE}{DIM}{text} ...{seconds}{PLAIN}")


_status = _Status()


@contextlib.contextmanager
def status(text: str, quiet: bool) -> Iterator[None]:
    """Shows a faint line on stderr while something lasts; on a terminal only."""
    with statuses(quiet) as say:
        say(text)
        yield


@contextlib.contextmanager
def statuses(quiet: bool) -> Iterator[Callable[[str], None]]:
    """The same of several lines, each in the place of the last."""
    if quiet or not is_terminal(sys.stderr):
        yield lambda text: None
        return
    with _status.shown() as say:
        yield say


@contextlib.contextmanager
def byte_progress(text: str, total: int, quiet: bool) -> Iterator[Any]:
    """A tqdm bar of bytes on stderr; on a terminal only, and gone when it is done."""
    from tqdm import tqdm

    with (
        statuses(quiet),  # without a text: an outer one does not write into the bar
        tqdm(
            desc=text,
            total=total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            delay=0.5,
            ncols=79,
            disable=quiet or not is_terminal(sys.stderr),
        ) as bar,
    ):
        yield bar


@contextlib.contextmanager
def bar(text: str, total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr, on a terminal only, that is gone at the end; yields what moves it on."""
    from tqdm import tqdm

    off = quiet or not is_terminal(sys.stderr)
    with tqdm(desc=text, total=total, unit=unit, leave=False, disable=off) as shown:
        yield shown.update


def read_stdin(flag: str) -> str:
    """All of stdin as text.

    Args:
        flag: with which it is given otherwise, and an example.

    Raises:
        RequestError: it is not UTF-8, too long, or a terminal.
    """
    if is_terminal(sys.stdin):
        raise RequestError(f"nothing was given: say {flag}, or give it on stdin.")
    try:
        return decode(read_input("-"), "stdin")
    except OSError as error:
        raise RequestError(f"stdin cannot be read: {error.strerror}.") from None


def read_file(path: str) -> str:
    """All of a file ("-" is stdin) as text.

    Raises:
        RequestError: it cannot be read, or is not UTF-8.
    """
    try:
        return decode(read_input(path), path)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}.") from None


def decode(data: bytes, name: str) -> str:
    """UTF-8 as text; RequestError, with the position, if it is not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 (byte {error.start}: {error.reason}); convert it first."
        ) from None


def seconds(value: float) -> str:
    """Seconds for people: "1.25 s", "12.3 ms"."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned lines with two spaces between columns.

    Args:
        right: columns that are aligned at their right end.
    """
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
