"""The user's messages to `rooflax chat`: typed, with prompt_toolkit, or piped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rooflax.cli import terminal
from rooflax.errors import RequestError
from rooflax.folders import state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'
ENDS = ("/bye", "/exit", "/quit")
BARE_ENDS = ("bye", "exit", "quit", "exit()", "quit()", ":q")
HOW_TO_END = "(Ctrl-D or /bye ends the conversation)"
MAX_HISTORY_BYTES, MAX_ENTRY_BYTES = 512 * 1024, 64 * 1024
"""Bytes of the history file, once it is cut; of one message in it."""
Complete = Callable[[str], tuple[str, Iterable[str]]]
"""From a line up to the cursor to the part at its end that is completed, and what it may become."""


def messages(first: str | None, complete: Complete = lambda line: ("", ())) -> Iterator[str]:
    """The user's messages that are not empty, until the input ends or one of ENDS comes.

    A piped message is a line, or a block of lines between \"\"\".

    Args:
        first: comes before those that are read.

    Raises:
        RequestError: what is piped is not UTF-8, or has a block without end.
    """
    if first is not None:
        yield first
    is_typed = terminal.is_terminal(sys.stdin)
    for message in _typed(complete) if is_typed else _blocks(_lines()):
        if message.strip() in ENDS:
            return
        if is_typed and message.strip() in BARE_ENDS:
            terminal.say(HOW_TO_END)
        elif message.strip():
            yield message


def is_command(message: str) -> bool:
    """Whether it is "/?" or begins with a slash and a word: "/usr/bin" and "// comment" are
    questions."""
    return re.match(r"/([a-z]+|\?)(\s|$)", message) is not None


def _lines(prompt: str = "") -> Iterator[str]:
    number = 0
    while True:
        if prompt:
            terminal.write(prompt)
        if not (line := sys.stdin.buffer.readline()):
            return
        number += 1
        yield terminal.decode(line, f"line {number} of stdin").rstrip("\r\n")


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """Lines, and what stands between \"\"\" as one."""
    block: list[str] | None = None
    for line in lines:
        if block is None and line.lstrip().startswith(QUOTES):
            block, line = [], line.lstrip().removeprefix(QUOTES)
        if block is None:
            yield line
        elif line.rstrip().endswith(QUOTES):
            yield "\n".join([*block, line.rstrip().removesuffix(QUOTES)]).strip("\n")
            block = None
        else:
            block.append(line)
    if block is not None:
        raise RequestError(f"A text that began with {QUOTES} has no end; end it with {QUOTES}.")


def _typed(complete: Complete) -> Iterator[str]:
    """Messages of a person at a terminal."""
    try:
        session = _session(complete)
    except ImportError:
        terminal.say(
            "History, completion and pasted texts of several lines need prompt_toolkit; say "
            "`pip install prompt_toolkit`.",
            is_faint=True,
        )
        yield from _blocks(_lines(PROMPT))
        return
    while True:
        try:
            text = session.prompt()
            text.encode()
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                terminal.say(HOW_TO_END)
        except EOFError:
            return
        except UnicodeEncodeError:
            terminal.say("What was typed is not UTF-8; set the terminal to UTF-8.")
        else:
            is_block = text.lstrip().startswith(QUOTES) and text.rstrip().endswith(QUOTES)
            yield (text.strip()[len(QUOTES) : -len(QUOTES)] if is_block else text).strip("\n")


def _is_open_block(text: str) -> bool:
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def _session(complete: Complete) -> PromptSession[str]:
    """Enter sends, but for a block that is open; a paste and Alt-Enter bring further lines.

    Raises:
        ImportError: prompt_toolkit is not installed.
    """
    # Asked where its cursor is, a terminal may answer too late.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    class Words(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            part, words = complete(document.text_before_cursor)
            for word in words:
                yield Completion(word, -len(part))

    class Past(History):
        def load_history_strings(self) -> Iterator[str]:
            return reversed(read_history())

        def store_string(self, string: str) -> None:
            keep(string)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    # More behind Enter is no typing: a paste in a terminal that does not mark it, or while an
    # answer was written.
    @keys.add("enter", filter=Condition(lambda: bool(session.app.key_processor.input_queue)))
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=Condition(lambda: _is_open_block(session.default_buffer.text)),
        prompt_continuation=lambda width, number, wraps: "  " if wraps else CONTINUED,
        completer=Words(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        history=Past(),
        key_bindings=keys,
        enable_suspend=True,
        output=create_output(always_prefer_tty=True),
    )
    return session


def history_file() -> str:
    """Path of the chat history: one JSON string per line."""
    return str(state_folder() / "chat_history")


def read_history() -> list[str]:
    """Messages of earlier conversations, oldest first; the file is cut where it has grown."""
    try:
        with open(history_file(), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_HISTORY_BYTES))
            is_cut = file.tell() > 0
            lines = file.read().split(b"\n")[1 if is_cut else 0 :]
        if is_cut:
            _replace(b"\n".join(lines))
    except (OSError, RuntimeError):  # or there is no home
        return []
    history = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, str):
                history.append(message)
    return history


def keep(message: str) -> None:
    """Adds a message to the history; one that is very long, or cannot be kept, is left out."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) <= MAX_ENTRY_BYTES and message.strip() not in (*ENDS, *BARE_ENDS):
        with contextlib.suppress(OSError, RuntimeError):
            state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            with _private(history_file(), os.O_APPEND) as file:
                file.write(line)


def _replace(data: bytes) -> None:
    temporary = f"{history_file()}.{os.getpid()}"
    with _private(temporary, os.O_TRUNC) as file:
        file.write(data)
    os.replace(temporary, history_file())


def _private(path: str, mode: int) -> Any:
    """A file to write that only its owner reads."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600), "wb")
