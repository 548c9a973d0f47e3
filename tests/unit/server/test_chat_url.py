"""`rooflax chat --url`: a conversation with a server."""

from __future__ import annotations

import io
import re
import sys

import pytest

from rooflax import http_client
from rooflax.cli import terminal
from rooflax.cli.chat_url import MEANT, body_of
from rooflax.cli.main import main, parser_of
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, QueueFull
from tests.support.cli.terminals import READY, Terminal
from tests.support.server.hostile import CHUNKED, answering, events, whole
from tests.support.server.live import wait_for


@pytest.fixture
def chat(live, monkeypatch, capfd):
    def run(text, *flags, url=None):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = main(["chat", "--url", url or live.url, *flags])
        told = capfd.readouterr()
        return code, told.out, told.err

    return run


def test_a_turn_knows_those_before_it(chat, scripted, llm):
    code, out, err = chat("Hi\nAgain\n", "--system", "Be kind.", "-n", "9", "--top-k", "3")
    assert (code, out, err) == (0, "Hello, world.\nHello, world.\n", "")
    (_, first, _), (ids, params, _) = scripted.asked
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    places = [text.index(part) for part in ("Be kind.", "Hi", "Hello, world.", "Again")]
    assert places == sorted(places)
    assert (params.max_tokens, params.top_k, first.max_tokens) == (9, 3, 9)


def test_every_sampling_field_arrives(chat, scripted):
    flags = {
        "--temperature": "0.5", "--top-p": "0.5", "--min-p": "0.1", "--seed": "7",
        "--repetition-penalty": "1.5", "--presence-penalty": "1", "--frequency-penalty": "1",
        "--logit-bias": "5=5", "--stop": "zz", "--stop-token-ids": "1,2", "--max-tokens": "3",
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    assert chat("Hi\n", *words, "--ignore-eos")[0] == 0
    params = scripted.asked[0][1]
    assert (params.temperature, params.top_p, params.min_p, params.seed) == (0.5, 0.5, 0.1, 7)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 1.0)
    assert (params.frequency_penalty, params.logit_bias) == (1.0, {5: 5.0})
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("zz",), (1, 2), True)
    assert set(body_of(SamplingParams())) == set()


def test_reasoning_is_shown_if_it_is_asked_for(chat, scripted):
    scripted.script = scripted.says("<think>Hm.</think>Yes.")
    assert chat("Hi\n") == (0, "Yes.\n", "")
    code, out, err = chat("Hi\n", "--show-thinking")
    assert (code, out, err) == (0, "Yes.\n", "Hm.\n")


def test_a_question_that_is_rejected_is_no_end(chat, scripted):
    scripted.error = (0, QueueFull("full"))
    code, out, err = chat("Hi\n/clear\n")
    assert (code, out, err.count("\n")) == (1, "", 2)
    assert "no commands" in err
    scripted.error = None
    code, out, err = chat("Hi\n", "nobody")
    assert code == 1 and "There is no model 'nobody'" in err


def test_what_a_server_says_moves_no_cursor(chat):
    said = whole(b'{"error": {"message": "a\\u001b[2Jb"}}', b"500 No")
    with answering(said) as url:
        err = chat("Hi\n", url=url)[2]
    assert "a?[2Jb" in err and "\x1b" not in err


def test_it_ends_with_a_command(chat, scripted):
    assert chat("Hi\n/bye\nAgain\n") == (0, "Hello, world.\n", "")


def test_a_person_is_told_the_tokens_that_the_server_counts(live, scripted, tmp_path):
    scripted.pause_s = 0.02
    terminal = Terminal(tmp_path, "--url", live.url)
    try:
        terminal.until(READY)
        said = terminal.ask("Hi")
        assert re.search(r"Hello, world\.\s+\(\d+ tokens, \d+ tokens/s\)", said)
        terminal.type("/bye\r")
        assert terminal.ends()[0] == 0
    finally:
        terminal.close()


def test_failures_end_it(chat, scripted):
    scripted.error = (2, EngineError("broken"))
    code, _, err = chat("Hi\n")
    assert code == 1 and "engine failed" in err
    code, _, err = chat("Hi\n", url="http://127.0.0.1:9")
    assert code == 1 and "does not answer" in err


def test_ctrl_c_ends_the_answer_and_not_the_conversation(chat, scripted, llm, monkeypatch):
    scripted.script, scripted.pause_s = scripted.says("One two three four five."), 0.02
    write, cut = terminal.write, scripted.num_cut

    def interrupted(text, wrap=str):
        write(text, wrap)
        if "two" in text and len(scripted.asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "write", interrupted)
    code, out, _ = chat("Hi\nAgain\n")
    first, second = out.splitlines()
    assert code == 0 and second == "One two three four five." and first != second
    wait_for(lambda: scripted.num_cut == cut + 1)
    text = llm.tokenizer.decode(scripted.asked[1][0], skip_special_tokens=False)
    assert first in text and second not in text


def flag_of(action):
    longs = [flag for flag in action.option_strings if flag.startswith("--")]
    own = f"--{action.dest.replace('_', '-')}"
    return own if own in longs else longs[0]


def test_flags_of_a_model_that_is_loaded_here_are_rejected(chat):
    actions = parser_of("chat")._actions
    others = [a for a in actions if a.dest not in (*MEANT, "help")]
    assert len(others) > 15
    for action in others:
        values = [] if action.nargs == 0 else ["int8" if action.dest == "quantize" else "1"]
        code, out, err = chat("Hi\n", action.option_strings[-1], *values)
        assert (code, out) == (2, ""), action.dest
        assert err.startswith(f"rooflax: {flag_of(action)} is about a model that is loaded here")


GOOD = b'{"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (events(b"x"), "is not a JSON object"),
        (events(b"[1]"), "is not a JSON object"),
        (events(b"\xff"), "is not a JSON object"),
        (events(b"[" * 100_000), "is not a JSON object"),
        (events(b'{"a": %s}' % (b"9" * 5000)), "is not a JSON object"),
        (events(b'{"choices": 5}'), "is not a list of choices"),
        (events(b'{"choices": [5]}'), "is not a list of choices"),
        (events(b'{"choices": [{"delta": 5}]}'), "delta that is an object"),
        (events(b'{"choices": [{"delta": {"content": 5}}]}'), "content that is text"),
        (events(b'{"error": "broken"}'), "rooflax: broken"),
        (events(b'{"error": 5}'), "gives no reason"),
        (CHUNKED + b"x\r\n", "chunk without its size"),
        (CHUNKED + b"-1\r\n", "chunk without its size"),
        (CHUNKED + b"f" * 40 + b"\r\n", "chunk without its size"),
        (whole(b"").replace(b": 0", b": abc"), "Content-Length that is not a number"),
        (whole(b"", b"abc"), "does not answer"),
        (whole(b"[1]"), "is no stream"),
        (whole(b"[" * 100_000, b"400 No"), "status 400"),
        (whole(b"x" * 70_000, b"400 No"), "64 KiB"),
    ],
)
def test_what_is_no_answer_is_a_sentence(chat, said, why):
    with answering(said) as url:
        code, out, err = chat("Hi\n", url=url)
    assert (code, out, err.count("\n")) == (1, "", 1) and why in err and "fault" not in err


@pytest.mark.parametrize("name", ["choices", "error"])
def test_null_is_nothing(chat, name):
    nothing = b'{"%s": null}' % name.encode()
    delta = b'{"choices": [{"delta": null, "finish_reason": null}]}'
    with answering(events(nothing, delta, b"null", GOOD, b"[DONE]")) as url:
        assert chat("Hi\n", url=url) == (0, "Yes\n", "")


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + events(GOOD),
        events(GOOD).replace(b"chunked", b"Chunked"),
        events(GOOD)[:-2] + b"X-Trailer: 1\r\n\r\n",
        CHUNKED + b"%x;a=b\r\ndata: %s\n\n\r\n0;c\r\n\r\n" % (len(GOOD) + 8, GOOD),
    ],
)
def test_every_framing_is_read(chat, said):
    with answering(said) as url:
        assert chat("Hi\n", url=url) == (0, "Yes\n", "")


def test_a_stream_that_was_cut_is_no_success(chat):
    begun = b'{"choices": [{"delta": {"content": "Ye"}}]}'
    for said, closes in ((events(begun), False), (events(begun)[:-5], True)):
        with answering(said, closes=closes) as url:
            code, out, err = chat("Hi\n", url=url)
        assert (code, out, err) == (1, "Ye\n", "rooflax: The server's answer was cut.\n")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\ndata: x", "a line of more than 1 MiB"),
        (b"HTTP/1.1 200 OK\r\n\r\n\n", "is over 4 MiB"),
        (b"HTTP/1.1 400 No\r\n\r\nx", "is over 64 KiB"),
        (b"HTTP/1.1 200 OK\r\nA: x", "does not answer"),
    ],
)
def test_an_answer_without_end_ends(chat, monkeypatch, said, why):
    monkeypatch.setattr(http_client, "MOST_BODY", 1 << 22)
    with answering(said, is_endless=True) as url:
        code, _, err = chat("Hi\n", url=url)
    assert code == 1 and why in err and len(err) < 500
