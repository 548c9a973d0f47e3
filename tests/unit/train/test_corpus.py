"""Which documents there are, in which order, and which of them are held out."""

import json
import os
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest

from rooflax.errors import RequestError
from rooflax.train.corpus import (
    ChatRow,
    Document,
    Preference,
    Prompt,
    PromptCompletion,
    dataset_files,
    documents,
    file_documents,
    file_prompts,
    folder_documents,
    hub_values,
    is_held_out,
    prompts,
    split_held_out,
)


@pytest.fixture
def folder(tmp_path):
    """Files written in another order than they shall be read."""
    for name in ("b.py", "a/z.py", "a.py", "a/b/c.py", "Z.py", "a-b.py", "readme.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path


def names(documents):
    return [document.name for document in documents]


def test_folders_are_read_in_the_order_of_their_paths(folder):
    found = list(folder_documents(folder))
    assert names(found) == ["Z.py", "a-b.py", "a.py", "a/b/c.py", "a/z.py", "b.py"]
    assert found[3] == Document("a/b/c.py", "# a/b/c.py\n")


def test_globs(folder):
    assert names(folder_documents(folder, "*.txt")) == ["readme.txt"]
    assert names(folder_documents(folder, "?.py")) == ["Z.py", "a.py", "a/b/c.py", "a/z.py", "b.py"]
    assert names(folder_documents(folder, "*.rst")) == []


def test_skipped_folders(folder):
    for name in ("site-packages", "__pycache__", ".git", "a/node_modules/b", "tests"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.py").write_text("x")
    (folder / "site-packages.py").write_text("a file may have that name")
    found = names(folder_documents(folder, skip=["tests"]))
    assert [name for name in found if "x.py" in name] == []
    assert "site-packages.py" in found
    assert "tests/x.py" in names(folder_documents(folder))


def test_empty_and_unreadable_files_of_a_folder_are_left_out(folder):
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes("# naïve\n".encode("latin-1"))
    (folder / "half.py").write_bytes("é".encode()[:1])
    (folder / "folder.py").mkdir()
    os.symlink(folder / "nowhere", folder / "dangling.py")
    assert len(names(folder_documents(folder))) == 6


def test_texts_are_taken_byte_for_byte(tmp_path):
    text = "a\r\nb\rc\n\ufeff\x00\u2028é\U0001f600"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    from_folder = list(folder_documents(tmp_path, "*.txt"))
    assert from_folder == list(file_documents([path])) == [Document("a.txt", text)]
    assert from_folder[0].num_bytes == path.stat().st_size


def test_a_missing_folder(tmp_path):
    with pytest.raises(RequestError, match=r"nowhere is not a folder; give one"):
        list(folder_documents(tmp_path / "nowhere"))


def write_jsonl(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", '\ufeff{"text": "one"}', '{"text": "two"}')
    assert list(file_documents([path])) == [
        Document("a.jsonl:1", "one"),
        Document("a.jsonl:2", "two"),
    ]


def test_jsonl_lines_are_documents_named_by_their_number(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        json.dumps({"text": "one\ntwo", "id": 3}),
        "",
        json.dumps({"text": ""}),
        json.dumps({"text": "line\u2028separator"}, ensure_ascii=False),
        json.dumps({"text": "smile \U0001f600"}) + "\r",
    )
    assert list(file_documents([path])) == [
        Document("a.jsonl:1", "one\ntwo"),
        Document("a.jsonl:4", "line\u2028separator"),
        Document("a.jsonl:5", "smile \U0001f600"),
    ]


def test_files_in_the_order_given_and_other_fields(tmp_path):
    lines = write_jsonl(tmp_path / "z.jsonl", '{"body": "x"}')
    text = tmp_path / "a.txt"
    text.write_text("y")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    found = file_documents([lines, text, empty, lines], field="body")
    assert names(found) == ["z.jsonl:1", "a.txt", "z.jsonl:1"]


def test_the_keys_of_a_line_say_its_kind(tmp_path):
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    tool = {"type": "function", "function": {"name": "f"}}
    path = write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, [
        {"messages": [user, answer], "text": "not this"},
        {"messages": [user, answer], "tools": [tool]},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": [user], "completion": [answer]},
        {"text": "plain", "prompt": "of no completion"},
    ]))  # fmt: skip
    where = [f"line {number} of {path}" for number in range(1, 6)]
    rows = list(file_documents([path]))
    assert rows == [
        ChatRow("a.jsonl:1", where[0], (user, answer)),
        ChatRow("a.jsonl:2", where[1], (user, answer), tools=(tool,)),
        PromptCompletion("a.jsonl:3", where[2], "2 + 2 =", " 4"),
        ChatRow("a.jsonl:4", where[3], (user, answer), num_prompt=1),
        Document("a.jsonl:5", "plain"),
    ]
    with pytest.raises(RequestError, match="^line 2 of .* with a string under 'text'"):
        list(file_documents([path], field="text"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": []}, "messages that are not a list of objects, each with a role"),
        ({"messages": [{"content": "x"}]}, "messages that are not a list of objects"),
        ({"messages": "hi"}, "messages that are not a list of objects"),
        ({"prompt": "x", "completion": [{"role": "user"}]}, "prompt and completion that"),
        ({"messages": [{"role": "user"}], "tools": {}}, "tools that are not a list"),
    ],
)
def test_lines_of_broken_messages(tmp_path, line, said):
    path = write_jsonl(tmp_path / "a.jsonl", "", json.dumps(line))
    with pytest.raises(RequestError, match=rf"^line 2 of .*a\.jsonl has {said}"):
        list(file_documents([path]))


def test_folders_of_parts(tmp_path):
    assert dataset_files(tmp_path) == {}
    for name in ("valid", "train"):
        write_jsonl(tmp_path / f"{name}.jsonl", '{"text": "x"}')
    found = dataset_files(tmp_path)
    assert {part: path.name for part, path in found.items()} == {
        "train": "train.jsonl", "valid": "valid.jsonl",
    }  # fmt: skip
    (tmp_path / "train.jsonl").unlink()
    assert dataset_files(tmp_path) == {}


@pytest.mark.parametrize(
    "line",
    ['{"text": 3}', '{"text": null}', '{"body": "x"}', '["text"]', '"text"', "3", "null", "{",
     '{"text": "x"} {"text": "y"}'],
    ids=lambda line: line[:20],
)  # fmt: skip
def test_bad_jsonl_lines(tmp_path, line):
    path = write_jsonl(tmp_path / "a.jsonl", '{"text": "good"}', line)
    with pytest.raises(
        RequestError, match=r"^line 2 of .*a\.jsonl .*('text'|is not JSON)"
    ) as caught:
        list(file_documents([path]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'{"text": "\ud83d"}', "has a lone surrogate under 'text', which is no Unicode text."),
        ('{"text": "x", "n": %s}' % ("9" * 5000), "has a number of more than 4,300 digits."),
        ('{"text": "x", "n": %s}' % ("[" * 100_000 + "]" * 100_000), "is nested too deeply."),
    ],
    ids=["surrogate", "digits", "nesting"],
)  # fmt: skip
def test_json_that_is_no_row_says_why(tmp_path, line, said):
    path = write_jsonl(tmp_path / "a.jsonl", '{"text": "good"}', line)
    with pytest.raises(RequestError) as caught:
        list(file_documents([path]))
    assert str(caught.value) == f"line 2 of {path} {said}"


def test_an_array_of_rows_is_not_trained_as_text(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"}, {"text": "b"}]')
    with pytest.raises(RequestError, match=r"rows\.json is a \.json file, and rows are the lines"):
        list(file_documents([path]))


def test_bad_files(tmp_path):
    bad = tmp_path / "latin.txt"
    bad.write_bytes("well\nnaïve\n".encode("latin-1"))
    with pytest.raises(RequestError, match=r"line 2 of .*latin\.txt is not UTF-8; convert"):
        list(file_documents([bad]))
    with pytest.raises(RequestError, match=r"cannot read .*nowhere\.txt: No such file"):
        list(file_documents([tmp_path / "nowhere.txt"]))
    with pytest.raises(RequestError, match=r"cannot read .*: Is a directory"):
        list(file_documents([tmp_path]))


NAMES = [f"package{i % 37}/module{i}.py" for i in range(4000)]


def test_the_held_out_tenth_is_a_tenth():
    assert 0.08 < sum(map(is_held_out, NAMES)) / len(NAMES) < 0.12


def test_the_split_is_the_same_on_every_machine():
    # The first eight bytes of the path's SHA-256, big-endian, divide by ten.
    held_out = [name for name in NAMES[:40] if is_held_out(name)]
    assert held_out == ["package0/module0.py", "package29/module29.py"]


def test_the_split_depends_on_paths_alone():
    documents = [Document(name, f"text {i}") for i, name in enumerate(NAMES[:300])]
    training, held_out = split_held_out(documents)
    assert sorted(names(training) + names(held_out)) == sorted(NAMES[:300])
    order = {name: i for i, name in enumerate(NAMES)}
    for part in (training, held_out):
        assert names(part) == sorted(names(part), key=order.__getitem__)
    # Other texts, another order, more documents: nobody changes sides.
    others = [Document(d.name, "") for d in reversed(documents)] + [Document("new.py", "")]
    assert {*names(split_held_out(others)[1])} - {"new.py"} == {*names(held_out)}


def test_fractions_are_nested():
    parts = [{n for n in NAMES if is_held_out(n, x)} for x in (0.0, 0.01, 0.1, 0.25, 0.5)]
    assert not parts[0]
    for smaller, larger in pairwise(parts):
        assert smaller < larger
    for part, share in zip(parts[1:], (0.01, 0.1, 0.25, 0.5), strict=True):
        assert abs(len(part) / len(NAMES) - share) < 0.02


def written(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_preferences_with_and_without_a_prompt(tmp_path):
    """Without one it is what both answers begin with, as TRL extracts it."""
    user, other = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}
    answer = {"role": "assistant", "content": "yes"}
    found = list(
        file_documents(
            [
                written(
                    tmp_path / "a.jsonl",
                    {"prompt": "2 + 2", "chosen": " = 4", "rejected": " = 5"},
                    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
                    {
                        "prompt": [user],
                        "chosen": [answer],
                        "rejected": [other],
                        "tools": [{"a": 1}],
                    },
                    {"chosen": [user, answer], "rejected": [user, other]},
                )
            ]
        )
    )
    assert all(isinstance(row, Preference) for row in found)
    texts = [(row.chosen.prompt, row.chosen.completion) for row in found[:2]]
    assert texts == [("2 + 2", " = 4"), ("The sky is", " blue.")]
    assert [row.rejected.completion for row in found[:2]] == [" = 5", " green."]
    for row in found[2:]:
        assert row.chosen.messages == (user, answer) and row.rejected.messages == (user, other)
        assert row.chosen.num_prompt == 1
    assert (found[2].chosen.tools, found[3].chosen.tools) == (({"a": 1},), None)


def test_preferences_beside_other_columns(tmp_path):
    """As ultrafeedback_binarized has them: the prompt as a text too, and a conversation."""
    user, answers = {"role": "user", "content": "hi"}, ("yes", "no")
    both = [[user, {"role": "assistant", "content": text}] for text in answers]
    row = {"prompt": "hi", "chosen": both[0], "rejected": both[1], "messages": both[0], "score": 1}
    (found,) = file_documents([written(tmp_path / "a.jsonl", row)], pairs=True)
    assert isinstance(found, Preference)
    assert (found.chosen.messages, found.rejected.messages) == tuple(map(tuple, both))
    assert found.chosen.num_prompt == 1
    (found,) = file_documents([written(tmp_path / "a.jsonl", row)])
    assert isinstance(found, ChatRow)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, "has no prompt, which is what chosen and rejected beg"),
        ({"chosen": "a", "rejected": "a"}, "has no prompt, which is"),
        ({"chosen": "a", "rejected": ["a"]}, "are neither two texts nor two lists of messages"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "has prompt and chosen that are neither"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "has prompt and rejected that are nei"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": []}, "has prompt and chosen "),
        ({"prompt": [{"role": "user"}], "chosen": [], "rejected": []}, "has chosen that are not"),
        ({"prompt": "a", "chosen": [], "rejected": []}, "has no prompt, which is"),
    ],
)
def test_broken_preferences(tmp_path, row, said):
    path = written(tmp_path / "a.jsonl", {"text": "x"}, row)
    with pytest.raises(RequestError, match=rf"^line 2 of .*a\.jsonl {said}|{said}") as caught:
        list(file_documents([path]))
    assert str(caught.value).startswith(f"line 2 of {path}")


def test_prompts_keep_their_other_columns(tmp_path):
    user = {"role": "user", "content": "hi"}
    path = written(
        tmp_path / "a.jsonl", {"prompt": "hi", "answer": 4}, {"prompt": [user], "tools": [{}]}
    )
    where = [f"line {number} of {path}" for number in (1, 2)]
    assert list(file_prompts([path])) == [
        Prompt("a.jsonl:1", where[0], "hi", {"answer": 4}),
        Prompt("a.jsonl:2", where[1], (user,), {}, ({},)),
    ]
    for bad, said in (("[1]", "JSON object with a prompt"), ('{"prompt": 3}', "not a list of obj")):
        path.write_text(bad)
        with pytest.raises(RequestError, match=f"^line 1 of .*{said}"):
            list(file_prompts([path]))
    with pytest.raises(RequestError, match=r"a\.txt is no \.jsonl file"):
        list(file_prompts([tmp_path / "a.txt"]))


def stand_in(monkeypatch, splits):
    """A `datasets` package that has one data set; what it was asked for."""
    asked = []

    def load_dataset(name, config, split=None):
        asked.append((name, config, split))
        if config == "none":
            raise ValueError("no such config.\nSee the hub.")
        return splits[split] if split else splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_splits_of_the_hub_are_parts(monkeypatch):
    rows = [{"text": f"text {number}"} for number in range(4)]
    asked = stand_in(monkeypatch, {"train": rows, "validation": rows[:1], "extra": rows})
    found = {part: list(documents(rows)) for part, rows in hub_values("hub:a/b").items()}
    assert {part: len(rows) for part, rows in found.items()} == {"train": 4, "valid": 1}
    assert found["train"][2] == Document("hub:a/b:2", "text 2")
    (only,) = hub_values("hub:a/b/c:extra").items()
    assert only[0] == "train" and [value for value, *_ in only[1]] == rows
    assert asked == [("a/b", None, None), ("a/b", "c", "extra")]


def test_rows_of_the_hub_are_named_in_errors(monkeypatch):
    stand_in(monkeypatch, {"train": [{"text": "x"}, {"body": "y"}], "test": [{"answer": 1}]})
    parts = hub_values("hub:a/b")
    with pytest.raises(RequestError, match="^row 1 of hub:a/b:train is not a JSON object with me"):
        list(documents(parts["train"]))
    with pytest.raises(RequestError, match="^row 0 of hub:a/b:test is not a JSON object with a p"):
        list(prompts(parts["test"]))


def test_rows_of_the_hub_are_apart_by_split(monkeypatch):
    """GRPO finds a prompt's tokens by where its row is."""
    splits = {name: [{"prompt": name}] for name in ("train", "validation", "test")}
    stand_in(monkeypatch, splits)
    found = [row for rows in hub_values("hub:a/b").values() for row in prompts(rows)]
    assert {row.where: row.prompt for row in found} == {
        f"row 0 of hub:a/b:{name}": name for name in splits
    }
    (row,) = prompts(hub_values("hub:a/b:test")["train"])
    assert row.where == "row 0 of hub:a/b:test"


@pytest.mark.parametrize("spec", ["hub:", "hub:a", "hub:a/", "hub:a/b/c/d", "hub:/b"])
def test_names_that_no_dataset_has(monkeypatch, spec):
    asked = stand_in(monkeypatch, {})
    with pytest.raises(RequestError, match="is not hub:OWNER/NAME"):
        hub_values(spec)
    assert asked == []


def test_a_dataset_that_does_not_load(monkeypatch):
    stand_in(monkeypatch, {})
    with pytest.raises(RequestError, match=r"^hub:a/b/none is not loaded: no such config\.$"):
        hub_values("hub:a/b/none")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match=r"pip install datasets"):
        hub_values("hub:a/b")
