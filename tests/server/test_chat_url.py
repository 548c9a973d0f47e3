"""`rooflax chat --url`: a conversation with a server."""

from __future__ import annotations

import io
import sys

import pytest

from rooflax.cli import terminal
from rooflax.cli.chat_url import MEANT, body_of
from rooflax.cli.main import main, parser_of
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, QueueFull
from tests.server.live import wait_for

pytestmark = pytest.mark.oldest_jax


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


def test_what_a_server_says_moves_no_cursor(chat, capfd):
    terminal.say("a\x1b[2Jb\r")
    assert capfd.readouterr().err == "a?[2Jb?\n"


def test_failures_end_it(chat, scripted):
    scripted.error = (2, EngineError("broken"))
    code, _, err = chat("Hi\n")
    assert code == 1 and "engine failed" in err
    code, _, err = chat("Hi\n", url="http://127.0.0.1:9")
    assert code == 1 and "does not answer" in err


def test_ctrl_c_ends_the_answer_and_not_the_conversation(chat, scripted, llm, monkeypatch):
    scripted.script, scripted.pause_s = scripted.says("One two three four five."), 0.02
    write, cut = terminal.write, scripted.num_cut

    def interrupted(text):
        write(text)
        if "two" in text and len(scripted.asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "write", interrupted)
    code, out, _ = chat("Hi\nAgain\n")
    first, second = out.splitlines()
    assert code == 0 and second == "One two three four five." and first != second
    wait_for(lambda: scripted.num_cut == cut + 1)
    text = llm.tokenizer.decode(scripted.asked[1][0], skip_special_tokens=False)
    assert first in text and second not in text


def test_flags_of_a_model_that_is_loaded_here_are_rejected(chat):
    actions = parser_of("chat")._actions
    others = [a for a in actions if a.dest not in (*MEANT, "help")]
    assert len(others) > 15
    for action in others:
        values = [] if action.nargs == 0 else ["int8" if action.dest == "quantize" else "1"]
        code, out, err = chat("Hi\n", action.option_strings[-1], *values)
        assert (code, out) == (2, ""), action.dest
        assert "loaded here" in err, err
