"""`rooflax chat`: turns, history, channels, Ctrl-C."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rooflax.cli import chat
from rooflax.conversation import Conversation
from rooflax.errors import CheckpointError, RequestError
from rooflax.fields.sampling import CHAT_SAMPLING
from rooflax.llm import Completion, Delta
from rooflax.loading.harmony import HarmonyFilter, speaks_harmony
from rooflax.loading.tokenizer import Tokenizer

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
ANSWER = (
    "<|channel|>analysis<|message|>The user says hé.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant"
    "<|channel|>final<|message|>Hello, naïve 😀!<|return|>"
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """A byte-level tokenizer with GPT-OSS's marks: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKS])
    folder = tmp_path_factory.mktemp("harmony")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def channels_of(tokenizer, ids, size):
    """Text by channel, fed in pieces of `size` tokens."""
    found, taken = {}, HarmonyFilter(tokenizer)
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    for channel, text in [p for ids in pieces for p in taken.push(ids)] + list(taken.flush()):
        found[channel] = found.get(channel, "") + text
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_channels_are_taken_apart_whatever_the_pieces(harmony, size):
    assert speaks_harmony(harmony)
    assert channels_of(harmony, harmony.encode(ANSWER), size) == {
        "analysis": "The user says hé.",
        "commentary": "{}",
        "final": "Hello, naïve 😀!",
    }


def test_an_answer_cut_short_keeps_what_is_whole(harmony):
    ids = harmony.encode("<|channel|>final<|message|>caf") + harmony.encode("é")[:1]
    assert channels_of(harmony, ids, 1) == {"final": "caf\ufffd"}
    assert channels_of(harmony, harmony.encode("<|channel|>fin"), 1) == {}
    assert channels_of(harmony, harmony.encode("<|message|>bare"), 1) == {"final": "bare"}


class FakeLLM:
    """Answers with given ids; remembers what it was asked."""

    def __init__(self, tokenizer, answers, max_model_len=400):
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.max_model_len, self.asked = max_model_len, []
        self.info = SimpleNamespace(
            name="fake", config=SimpleNamespace(is_causal=True, has_head=True)
        )
        self.processor = SimpleNamespace(chat_values=dict)

    def encode(self, text):
        return self.tokenizer.encode(text)

    def encode_chat(self, messages):
        from rooflax.loading.chat_template import encode_chat

        return encode_chat(self.tokenizer, messages, add_generation_prompt=True)

    def stream(self, prompts, params):
        self.params = params
        self.asked.append(self.tokenizer.decode(prompts[0], skip_special_tokens=False))
        ids = self.encode(self.answers.pop(0))
        for i, token in enumerate(ids):
            last = i == len(ids) - 1
            done = Completion("", (), (), "stop") if last else None
            text = self.tokenizer.decode([token])
            yield Delta(0, 0, text, (token,), done)


@pytest.fixture
def talk(rooflax, monkeypatch):
    """Runs chat against a fake model."""

    def run(llm, *flags, stdin):
        monkeypatch.setattr(chat, "open_llm", lambda args: llm)
        return rooflax("chat", *flags, stdin=stdin)

    return run


def test_the_final_channel_is_shown_and_remembered(talk, harmony):
    llm = FakeLLM(harmony, [ANSWER, ANSWER])
    ran = talk(llm, "--system", "Be kind.", stdin=b"hi\n\nagain\n")
    assert ran.code == 0
    assert ran.out == "Hello, naïve 😀!\n" * 2
    assert "The user says" not in ran.err
    assert llm.asked[1] == (
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|message|>Hello, naïve 😀!<|end|>"
        "<|start|>user<|message|>again<|end|><|start|>assistant"
    )


def test_show_thinking_shows_the_other_channels_on_stderr(talk, harmony):
    ran = talk(FakeLLM(harmony, [ANSWER]), "--show-thinking", stdin=b"hi\n")
    assert ran.out == "Hello, naïve 😀!\n"
    assert "The user says hé.{}\n" in ran.err


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, harmony):
    llm = FakeLLM(harmony, ["<|message|>" + "x" * 50, "<|message|>second"])
    whole = llm.stream

    def interrupted(prompts, params):
        for i, delta in enumerate(whole(prompts, params)):
            if i == 5 and len(llm.asked) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    llm.stream = interrupted
    ran = talk(llm, stdin=b"hi\nagain\n")
    assert (ran.code, ran.out) == (0, "xxxxx\nsecond\n")
    assert "xxxxx<|end|>" in llm.asked[1]


@pytest.mark.parametrize("end", ["/bye", "/exit", "/quit"])
def test_piped_lines_end_where_one_says_so(talk, harmony, end):
    ran = talk(FakeLLM(harmony, ["<|message|>ok"] * 2), stdin=f"exit\nhi\n{end}\nmore\n".encode())
    assert (ran.code, ran.out, ran.err) == (0, "ok\nok\n", "")


@pytest.mark.parametrize("text", ["// a comment", "/usr/bin/env?", "/* why */"])
def test_a_slash_without_a_word_is_no_command(talk, harmony, text):
    llm = FakeLLM(harmony, ["<|message|>ok"])
    ran = talk(llm, stdin=f"{text}\n/frob\n".encode())
    assert (ran.code, ran.out) == (0, "ok\n") and text in llm.asked[0]
    assert ran.err == "rooflax: /frob is no command; /help lists them.\n"


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        ([], (0.7, 0.9)),
        (["--temperature", "0.2"], (0.2, 0.9)),
        (["--temp", "1", "--top-p", "1"], (1.0, 1.0)),
    ],
)
def test_a_chat_is_sampled_as_chats_are_where_nobody_says_how(talk, harmony, flags, used):
    llm = FakeLLM(harmony, ["<|message|>ok"])
    llm.processor.chat_values = lambda: CHAT_SAMPLING
    assert talk(llm, *flags, stdin=b"hi\n").code == 0
    assert (llm.params.temperature, llm.params.top_p) == used


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/?", "/help "),
        ("/new", "The conversation is empty."),
        ("/reset", "The conversation is empty."),
        ("/retry", "There is no question to answer again."),
        ("/set parameter temperature 0.5", "/set is no command: /params NAME=VALUE sets"),
        ("/show info", "/show is no command: /params and /system show"),
        ("/model qwen", "/model is no command: a conversation keeps its model"),
        ("/save", "/save needs the name of a file."),
        ("/load", "/load needs the name of a file."),
        ("/params n=3", "n is not for a chat, whose turns have one answer each."),
        ("/params num_beams=2", "num_beams is not for a chat"),
    ],
)
def test_commands_of_other_chats_work_or_name_what_there_is_here(talk, harmony, line, said):
    llm = FakeLLM(harmony, [])
    ran = talk(llm, stdin=f"{line}\n".encode())
    assert (ran.code, ran.out, llm.asked) == (0, "", []) and said in ran.err


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ("temp=0.5", "temperature", 0.5),
        ("top-p=0.5", "top_p", 0.5),
        ("--top-k=5", "top_k", 5),
        ("repeat_penalty=1.5", "repetition_penalty", 1.5),
        ("num_predict=5", "max_tokens", 5),
    ],
)
def test_parameters_have_the_names_that_are_usual(talk, harmony, said, name, value):
    ran = talk(FakeLLM(harmony, []), stdin=f"/params {said}\n".encode())
    assert ran.err == f"{name}={value}\n"
    ran = talk(FakeLLM(harmony, []), stdin=b"/params tmperature=1\n")
    assert "is no sampling parameter (did you mean temperature?)" in ran.err


def test_a_template_that_fails_ends_the_talk_and_keeps_no_turn(talk, harmony, monkeypatch):
    def fails(messages):
        raise CheckpointError("the chat template loops")

    llm = FakeLLM(harmony, [])
    llm.encode_chat = fails
    ran = talk(llm, stdin=b"hi\nagain\n")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "rooflax: the chat template loops\n"
    conversation = Conversation(llm)
    with pytest.raises(CheckpointError):
        conversation.ask("hi", 10)
    assert conversation.turns == []


def test_a_turn_that_fails_while_answering_is_not_remembered(talk, harmony):
    llm = FakeLLM(harmony, ["<|message|>ok"])
    whole = llm.stream

    def fails_once(prompts, params):
        llm.stream = whole
        raise RequestError("too much")
        yield

    llm.stream = fails_once
    ran = talk(llm, stdin=b"first\nsecond\n")
    assert (ran.code, ran.out) == (1, "ok\n")
    assert "first" not in llm.asked[0]


@pytest.mark.every_jax
def test_a_base_model_goes_on_with_the_text_and_says_so(rooflax):
    ran = rooflax("chat", TINY, "-n", 3, "--temp", 0, stdin=b"def f(\nx\n")
    base = ("generate", TINY, "-n", 3, "--temp", 0, "--json", "-p")
    first = json.loads(rooflax(*base, "def f(").out)["text"]
    second = json.loads(rooflax(*base, f"def f({first}\nx").out)["text"]
    assert (ran.code, ran.out) == (0, f"{first}\n{second}\n")
    assert ran.err == f"{TINY} has no chat template: it goes on with what you write.\n"


def test_stdin_that_is_not_utf8_is_rejected_with_its_line(rooflax):
    ran = rooflax("chat", TINY, "-n", 1, stdin=b"good\nb\xffd\n")
    assert ran.code == 2
    assert "line 2 of stdin is not UTF-8" in ran.err


def test_old_turns_are_forgotten_when_the_context_is_full(talk, harmony):
    llm = FakeLLM(harmony, ["<|message|>ok"] * 4, max_model_len=120)
    ran = talk(llm, "-n", "20", stdin=b"one.....................\ntwo.....\nthree\nfour\n")
    assert ran.code == 0
    assert "(the oldest turn no longer fit" in ran.err
    assert "one" in llm.asked[0]
    assert "one" not in llm.asked[-1]
    assert "four" in llm.asked[-1]


def test_a_turn_that_is_too_long_is_rejected_and_the_talk_goes_on(talk, harmony):
    llm = FakeLLM(harmony, ["<|message|>ok"], max_model_len=100)
    ran = talk(llm, "-n", "10", stdin=b"x" * 200 + b"\nshort\n")
    assert (ran.code, ran.out) == (1, "ok\n")  # nobody is there to say it shorter
    assert "the context of 100 has room for 90" in ran.err
    assert "xx" not in llm.asked[0]


def test_a_conversation_without_room_keeps_its_turns(harmony):
    conversation = Conversation(FakeLLM(harmony, [], max_model_len=60))
    conversation.ask("hi", 10)
    conversation.answer("there")
    with pytest.raises(RequestError, match="room for 50"):
        conversation.ask("y" * 60, 10)
    assert [turn.question for turn in conversation.turns] == ["hi"]
