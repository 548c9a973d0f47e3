"""`rooflax eval`: losses and accuracies by a forward of their own, keys of public data sets."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rooflax import LLM
from rooflax.cli.eval import Question, question
from rooflax.errors import RequestError
from rooflax.loading.chat_template import encode_answers

pytestmark = pytest.mark.oldest_jax

TINY, CHAT = "preset:qwen2.5-tiny", "rooflax-chat-5m"
TEXT = "import os\n\n\ndef main(path):\n    return os.path.join(path, 'naïve')\n"
CHATS = [
    [("user", "Say 3."), ("assistant", "It is three."), ("user", "And?"), ("assistant", "Four.")],
    [("user", "What does len do?"), ("assistant", "It counts.")],
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def llm():
    return LLM(CHAT)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Files to score; their folder is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    write(tmp_path / "texts.jsonl", [{"text": TEXT}, {"text": "x = 1"}])
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    write(tmp_path / "chats.jsonl", [{"messages": each} for each in messages])
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def logprobs(llm, ids):
    """Of each token but the first, from the logits of the whole sequence."""
    logits = llm.logits(ids).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log[np.arange(len(ids) - 1), ids[1:]]


def results(rooflax, *argv):
    ran = rooflax("eval", *argv, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["results"]


def test_texts_equal_a_forward(rooflax, data, llm):
    one, rows = results(rooflax, CHAT, "--data", "text.txt", "texts.jsonl")
    whole = logprobs(llm, llm.encode(TEXT))
    assert (one["rows"], one["tokens"]) == (1, len(whole))
    assert one["loss"] == pytest.approx(-whole.mean(), abs=TOLERANCE)
    assert one["perplexity"] == pytest.approx(math.exp(-whole.mean()), rel=TOLERANCE)
    both = np.concatenate([whole, logprobs(llm, llm.encode("x = 1"))])
    assert (rows["rows"], rows["tokens"]) == (2, len(both))
    assert rows["loss"] == pytest.approx(-both.mean(), abs=TOLERANCE)
    same = json.loads(rooflax("perplexity", CHAT, "--file", "text.txt", "--json").out)
    assert (same["loss"], same["tokens"]) == (one["loss"], one["tokens"])


@pytest.mark.parametrize(
    ("flags", "since"), [((), None), (("--assistant-only-loss",), 0), (("--mask-prompt",), -1)]
)
def test_chats_count_what_training_counts(rooflax, data, llm, flags, since):
    (found,) = results(rooflax, CHAT, "--data", "chats.jsonl", *flags)
    wanted = []
    for chat in CHATS:
        messages = [{"role": role, "content": text} for role, text in chat]
        first = len(messages) - 1 if since == -1 else 0
        ids, scored = encode_answers(llm.tokenizer, messages, since=first)
        counts = np.ones(len(ids), bool) if since is None else np.array(scored)
        wanted.append(logprobs(llm, ids)[counts[1:]])
    wanted = np.concatenate(wanted)
    assert (found["rows"], found["tokens"]) == (2, len(wanted))
    assert found["loss"] == pytest.approx(-wanted.mean(), abs=TOLERANCE)


def test_a_long_row_is_scored_in_windows(rooflax, data, llm):
    """Each token once, in the first window that has it."""
    ids = llm.encode(TEXT * 2)[:24]
    (data / "text.txt").write_text(llm.decode(ids), encoding="utf-8")
    assert llm.encode(llm.decode(ids)) == ids
    (found,) = results(rooflax, CHAT, "--data", "text.txt", "-c", "16")
    windows = logprobs(llm, ids[:16]), logprobs(llm, ids[8:24])[7:]
    wanted = np.concatenate(windows)
    assert found["tokens"] == len(wanted) == 23
    assert found["loss"] == pytest.approx(-wanted.mean(), abs=TOLERANCE)


QUESTIONS = [
    {"question": "What does len do?", "choices": ["It counts the items.", "No."], "answer": 0},
    {"question": "Which is a keyword?", "choices": ["banana", "def", "two words"], "answer": 1},
    {"question": "Once?", "choices": ["a", "bb", "ccc", "dddd"], "answer": 3},
]


def test_choices_equal_a_forward(rooflax, data, llm):
    write(data / "q.jsonl", QUESTIONS)
    (found,) = results(rooflax, CHAT, "--data", "q.jsonl")
    right = normalized = 0
    for row in QUESTIONS:
        prompt = f"Question: {row['question']}\nAnswer:"
        first = len(llm.encode(prompt))
        ids = [llm.encode(f"{prompt} {choice}") for choice in row["choices"]]
        sums = np.array([logprobs(llm, each)[first - 1 :].sum() for each in ids])
        right += sums.argmax() == row["answer"]
        characters = np.array([len(choice) for choice in row["choices"]])
        normalized += (sums / characters).argmax() == row["answer"]
    assert found == {"data": "q.jsonl", "rows": 3, "acc": right / 3, "acc_norm": normalized / 3}


def test_questions_of_the_hub(rooflax, data, monkeypatch):
    module = SimpleNamespace(load_dataset=lambda name, config, split: {"mc": QUESTIONS}[split])
    monkeypatch.setitem(sys.modules, "datasets", module)
    write(data / "q.jsonl", QUESTIONS)
    hub, file = results(rooflax, CHAT, "--data", "hub:a/b:mc", "q.jsonl")
    assert hub | {"data": ""} == file | {"data": ""} and hub["data"] == "hub:a/b:mc"


def test_a_table_of_eighty_columns(rooflax, data):
    write(data / "q.jsonl", QUESTIONS[:1])
    (data / ("a" * 60)).write_text(TEXT, encoding="utf-8")
    ran = rooflax("eval", CHAT, "--data", "a" * 60, "chats.jsonl", "q.jsonl")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    names = ["data", "rows", "tokens", "loss", "perplexity", "acc", "acc_norm"]
    assert lines[0].split() == names
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert lines[1].startswith("...aaa")


@pytest.mark.parametrize(
    ("row", "prompt", "choices", "answer"),
    [
        ({"question": "Q", "choices": ["x", "y"], "answer": 1}, "Question: Q\nAnswer:", "xy", 1),
        ({"question": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
         "Question: Q\nAnswer:", "xy", 1),
        ({"question": "Q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"},
         "Question: Q\nAnswer:", "xy", 0),
        ({"question_stem": "Q", "choices": {"text": ["x", "y"], "label": ["A", "B"]},
          "answerKey": "A"}, "Q", "xy", 0),
        ({"ctx": "Q", "ind": 4, "endings": ["x", "y", "z"], "label": "2"}, "Q", "xyz", 2),
        ({"prompt": "Q", "choices": ["x", "y", "z"], "answer": "C"}, "Q", "xyz", 2),
    ],
)  # fmt: skip
def test_keys_of_public_data_sets(row, prompt, choices, answer):
    """MMLU, ARC (both kinds of labels), OpenBookQA, HellaSwag."""
    assert question(row, "here") == Question("here", prompt, tuple(choices), answer)


NUMBER = "no number from 0 to 1 and no label of a choice"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "is not a JSON object with a question"),
        ({"choices": ["x", "y"], "answer": 0}, "no text under question, question_stem"),
        ({"prompt": " ", "choices": ["x", "y"], "answer": 0}, "no text under question"),
        ({"prompt": 5, "choices": ["x", "y"], "answer": 0}, "no text under question"),
        ({"prompt": "Q", "choices": ["x"], "answer": 0}, "no list of two or more texts"),
        ({"prompt": "Q", "choices": "xy", "answer": 0}, "no list of two or more texts"),
        ({"prompt": "Q", "choices": ["x", ""], "answer": 0}, "no list of two or more texts"),
        ({"prompt": "Q", "choices": {"text": None}, "answer": 0}, "no list of two or more"),
        ({"prompt": "Q", "choices": ["x", "y"]}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": 2}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": -1}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": True}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": "C"}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": "9" * 5000}, NUMBER),
        ({"prompt": "Q", "choices": ["x", "y"], "answer": [0]}, NUMBER),
        ({"prompt": "Q", "choices": {"text": ["x", "y"], "label": 3}, "answer": "A"}, NUMBER),
    ],
)
def test_rows_that_are_no_questions(row, said):
    with pytest.raises(RequestError) as caught:
        question(row, "line 3 of q.jsonl")
    assert str(caught.value).startswith("line 3 of q.jsonl ") and said in str(caught.value)


GOOD = json.dumps(QUESTIONS[0]) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("q.jsonl", GOOD + "{", "line 2 of q.jsonl is not JSON: Expecting property name"),
        ("q.jsonl", GOOD + '{"text": "x"}', "line 2 of q.jsonl has no text under question"),
        ("q.jsonl", "{}", "line 1 of q.jsonl is not a JSON object with messages"),
        ("q.jsonl", '{"messages": [{"role": "user"}]}', "line 1 of q.jsonl: "),
        ("q.jsonl", '{"text": "x"}', "q.jsonl:1 has no token to score"),
        ("q.jsonl", '{"chosen": "ab", "rejected": "ac"}', "has a chosen and a rejected answer"),
        ("q.jsonl", "", "q.jsonl holds nothing to score"),
        ("q.txt", "", "q.txt holds nothing to score"),
        ("q.jsonl", json.dumps(QUESTIONS[0] | {"question": "long " * 3000}), "line 1 of q.jsonl: "),
    ],
)
def test_bad_files_are_one_sentence(rooflax, data, name, content, said):
    (data / name).write_text(content)
    ran = rooflax("eval", TINY, "--data", name, "-c", 1024)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_no_such_file_and_no_prompt_to_mask(rooflax, data):
    assert "cannot read nowhere" in rooflax("eval", TINY, "--data", "nowhere").err
    ran = rooflax("eval", TINY, "--data", "texts.jsonl", "--mask-prompt")
    assert ran.code == 2 and "texts.jsonl:1: plain text has no prompt to mask" in ran.err
    write(data / "q.jsonl", QUESTIONS)
    ran = rooflax("eval", TINY, "--data", "q.jsonl", "--assistant-only-loss")
    assert ran.code == 2 and "--assistant-only-loss is for chats, and q.jsonl holds" in ran.err
