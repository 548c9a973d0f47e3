"""Tool calls and reasoning out of tokens: however a text is cut, the events are the same.

The oracle of the data is the chat template: what it renders is read back. The oracle of the reader
is transformers' parser of responses.
"""

from __future__ import annotations

import functools
import json
import random
import re
import time
from pathlib import Path

import pytest

from rooflax.loading.incremental import spelled_bytes
from rooflax.loading.tokenizer import Tokenizer
from rooflax.server.call_formats import format_of, formats
from rooflax.server.open_call import Event
from rooflax.server.reader import TRANSITIONS, Reader
from tests.support.loading import fixtures as tokenizers
from tests.support.loading.rendering import render
from tests.unit.loading.test_chat_template import TEMPLATES

FORMATS = {each.name: each for each in formats()}
ARGUMENTS = {"city": "Oslo", "days": [1, 2], "note": 'a "b" {c} </x> \\ é 日本\n'}
HEAD = json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory, llm):
    """A tokenizer whose special tokens are those of the format."""
    root = tmp_path_factory.mktemp("tokenizers")
    found = {
        kind: Tokenizer(tokenizers._write_folder(root / kind, kind))
        for kind in ("qwen", "llama3", "gpt_oss")
    }
    of_format = {"llama3_json": "llama3", "harmony": "gpt_oss", "embedded": "embedded"}
    found["embedded"] = llm.tokenizer
    return lambda name: found[of_format.get(name, "qwen")]


@functools.cache
def spelled_ids(tokenizer):
    """The first id of what is spelled: of special tokens, and of the others."""
    special, ids = {}, {}
    for number, piece in enumerate(spelled_bytes(tokenizer)):
        if piece:
            known = special if number in tokenizer.special_token_ids else ids
            known.setdefault(piece, number)
    return special, ids


def cut(tokenizer, text, rng):
    """Ids that spell a text: random ones, or without `rng` the shortest; special ones are meant."""
    special, ids = spelled_ids(tokenizer)
    data, found, at = text.encode(), [], 0
    while at < len(data):
        mark = next((m for m in special if data.startswith(m, at)), None)
        if mark is not None:
            found.append(special[mark])
            at += len(mark)
            continue
        sizes = [
            n for n in range(1, 17) if data[at : at + n] in ids and len(data[at : at + n]) == n
        ]
        size = rng.choice(sizes) if rng else sizes[0]
        found.append(ids[data[at : at + size]])
        at += size
    return found


def read(tokenizer, format, ids, *, prompt=(), tools=True, schemas=None, is_cut=False):
    """Content, the other events, neighbours of one kind joined, and the whole reading."""
    reader = Reader(tokenizer, format, prompt, reads_calls=tools, schemas=schemas)
    content = "".join(reader.push(token) for token in ids) + reader.flush(is_cut=is_cut)
    reading = reader.take(len(content), is_last=True)
    events = joined(reading.events)
    assert "".join(each.text for each in events if each.kind == "content") == content
    return content, [each for each in events if each.kind != "content"], reading


def joined(events):
    """Neighbours of one kind as one."""
    found: list[Event] = []
    for each in events:
        if found and each.kind == found[-1].kind and each.kind not in ("call", "call_end"):
            found[-1] = Event(each.kind, found[-1].text + each.text)
        else:
            found.append(each._replace(at=0))
    return found


def call(name, arguments=HEAD, raw=""):
    return [Event("call", name), Event("arguments", arguments), Event("call_end", raw)]


def broken(arguments, raw):
    """Of a function f, with arguments that do not parse."""
    return call("f", arguments, CALL_F + raw)


def thought(text):
    return [Event("reasoning", text)]


BODY = '{"name": "look", "arguments": ' + HEAD + "}"
LLAMA = '{"name": "look", "parameters": ' + HEAD + "}"
XML = """<function=look>
<parameter=city>
Oslo
</parameter>
<parameter=days>
[1, 2]
</parameter>
<parameter=note>
5
</parameter>
</function>"""
XML_ARGUMENTS = json.dumps({"city": "Oslo", "days": [1, 2], "note": "5"})
NEWLINE = "\n"
GLM = """<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
<arg_key>days</arg_key>
<arg_value>[1, 2]</arg_value>
<arg_key>note</arg_key>
<arg_value>5</arg_value>
"""
DEEP_BEGIN, DEEP, DEEP_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
DEEP_SEP, DEEP_LAST = "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"


def deep_r1(name, arguments):
    return f"{DEEP}function{DEEP_SEP}{name}\n```json\n{arguments}\n```{DEEP_END}"


MARKED = json.dumps({"x": 'a</tool_call>b"</tool_call>[TOOL_CALLS]<|end|>\\', "</tool_call>": "<"})
CALL_F = '<tool_call>{"name": "f", "arguments": '
GEMMA = "{city:QOslo {1}, 日本Q,deep:{a:null,b:true,c:[QxQ,-2.5]},n:3}"
GEMMA_ARGUMENTS = json.dumps(
    {"city": "Oslo {1}, 日本", "deep": {"a": None, "b": True, "c": ["x", -2.5]}, "n": 3},
    ensure_ascii=False,
)
MESSAGE, CHANNEL = "<|message|>", "<|channel|>"
NO_CALL = "<tool_call>\nlook at this\n</tool_call>"
NEXT = f"<|end|><|start|>assistant{CHANNEL}"
TO_LOOK = f"commentary to=functions.look <|constrain|>json{MESSAGE}{HEAD}"
GEMMA_TWO = "".join(
    f"<start_function_call>call:{each}<end_function_call>" for each in ("look{}", "see{a:[1]}")
)
CASES = {
    "hermes": [
        ("Hello, world.\n", "Hello, world.\n", []),
        (f"<tool_call>\n{BODY}\n</tool_call>", "", call("look")),
        (f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call>", "", call("look") * 2),
        (f"Let me look.\n<tool_call>\n{BODY}\n</tool_call>", "Let me look.", call("look")),
        ("<think>\nHm, 日本 é.\n</think>\n\nYes.", "Yes.", thought("Hm, 日本 é.")),
        (f"<think>\nHm.\n</think>\n\n<tool_call>\n{BODY}\n</tool_call>", "",
         thought("Hm.") + call("look")),
        (NO_CALL + " x", NO_CALL + " x", []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("a < b <tool", "a < b <tool", []),
        ("<think>\nnever closed", "", thought("never closed")),
        ("x <think> is text here", "x <think> is text here", []),
        ("", "", []),
        *(
            (f'<tool_call>{{"name": "f"{more}}}</tool_call>', "", call("f", "{}"))
            for more in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": "{}"',
                         ', "type": "function"')
        ),
        ('<tool_call>{"name": "f"}', "", call("f", "{}")),
    ],
    "llama3_json": [
        (LLAMA, "", call("look")),
        (f"<|python_tag|>{LLAMA}", "", call("look")),
        ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ('{"nam', '{"nam', []),
        ('{"name": "look"}', "", call("look", "{}")),
        ('{"name": "look", "parameters": null}', "", call("look", "{}")),
        ('{"name": "Ada"}', '{"name": "Ada"}', []),
        ('{"name": "look", "age": 3}', '{"name": "look", "age": 3}', []),
        (f"Look: {LLAMA}", f"Look: {LLAMA}", []),
        (LLAMA.replace("{", '{"type": "function", ', 1), "", call("look")),
        ("<|python_tag|>" + LLAMA.replace("{", '{"type": "function", ', 1), "", call("look")),
        (LLAMA.replace("{", "{ ", 1), "", call("look")),
        (LLAMA.replace("parameters", "arguments"), "", call("look")),
        (f'{{\n  "name": "look",\n  "parameters": {HEAD}\n}}', "", call("look")),
        (f'{{"parameters": {HEAD}, "name": "look"}}', "", call("look")),
        ('{"names": ["Ada"]} \n', '{"names": ["Ada"]} \n', []),
        ("{}", "{}", []),
    ],
    "qwen3_coder": [
        (f"<tool_call>\n{XML}\n</tool_call>", "", call("look", XML_ARGUMENTS)),
        (NO_CALL, NO_CALL, []),
        (XML, "", call("look", XML_ARGUMENTS)),
        (f"{XML}\n</tool_call>", "", call("look", XML_ARGUMENTS)),
        (f"So.\n{XML}\n<tool_call>\n{XML}\n</tool_call>\n", "So.",
         call("look", XML_ARGUMENTS) * 2),
        ("<function=look at this</function> x", "<function=look at this</function> x", []),
    ],
    "mistral_ids": [
        (f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{HEAD}", "",
         [Event("call", "look", id="abcdefghi"), *call("look")[1:]]),
        (f"[TOOL_CALLS]look[ARGS]{HEAD}[TOOL_CALLS]see[ARGS]{{}}", "",
         call("look") + call("see", "{}")),
    ],
    "mistral": [
        (f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{HEAD}", "",
         [Event("call", "look", id="abcdefghi"), *call("look")[1:]]),
        (f"[TOOL_CALLS]look[ARGS]{HEAD}", "", call("look")),
        (f"[TOOL_CALLS]look[ARGS]{HEAD}[TOOL_CALLS]see[ARGS]{{}}", "",
         call("look") + call("see", "{}")),
        (f"[TOOL_CALLS][{BODY}, {BODY}]", "", call("look") * 2),
        ("[TOOL_CALLS]look", "", call("look", "{}")),
        ("[TOOL_CALLS]look[ARGS][TOOL_CALLS]look[ARGS]", "", call("look", "{}") * 2),
        ("[TOOL_CALLS]no", "[TOOL_CALLS]no", []),
        (f"[TOOL_CALLS]f[ARGS]{MARKED}[TOOL_CALLS]see[ARGS]{{}}", "",
         call("f", MARKED) + call("see", "{}")),
        ("[THINK]Hm.[/THINK]Yes.", "Yes.", thought("Hm.")),
    ],
    "mistral_list": [
        (f"[TOOL_CALLS][{BODY}, {BODY}]", "", call("look") * 2),
        (f"[TOOL_CALLS] [{BODY}]", "", call("look")),
        (f'[TOOL_CALLS] [{BODY[:-1]}, "id": "abcdefghi"}}]', "",
         [Event("call", "look", id="abcdefghi"), *call("look")[1:]]),
        ("[TOOL_CALLS]no", "[TOOL_CALLS]no", []),
        ('[TOOL_CALLS][{"name": "f"}]', "", call("f", "{}")),
    ],
    "glm": [
        (f"<tool_call>look\n{GLM}</tool_call>", "", call("look", XML_ARGUMENTS)),
        (f"<tool_call>look{GLM.replace(NEWLINE, '')}</tool_call>", "",
         call("look", XML_ARGUMENTS)),
        ("<tool_call>look\n</tool_call>\n<tool_call>see</tool_call>", "",
         call("look", "{}") + call("see", "{}")),
        ("\n<think>Hm.</think>\nYes.\n<tool_call>see\n</tool_call>", "Yes.",
         thought("Hm.") + call("see", "{}")),
        (NO_CALL, NO_CALL, []),
    ],
    "deepseek": [
        (f"{DEEP_BEGIN}{DEEP}look{DEEP_SEP}{HEAD}{DEEP_END}{DEEP_LAST}", "", call("look")),
        (f"So.{DEEP_BEGIN}{DEEP}look{DEEP_SEP}{HEAD}{DEEP_END}{DEEP}see{DEEP_SEP}{{}}{DEEP_END}",
         "So.", call("look") + call("see", "{}")),
        (f"{DEEP}look{DEEP_SEP}{DEEP_END}{DEEP}look{DEEP_END}", "", call("look", "{}") * 2),
        ("<think>Hm.</think>Yes.", "Yes.", thought("Hm.")),
    ],
    "deepseek_r1": [
        (f"{DEEP_BEGIN}{deep_r1('look', HEAD)}\n{deep_r1('see', '{}')}{DEEP_LAST}", "",
         call("look") + call("see", "{}")),
        ("<think>\nHm.\n</think>\n\nYes.", "Yes.", thought("Hm.")),
    ],
    "gemma": [
        (f"<start_function_call>call:look{GEMMA.replace('Q', '<escape>')}<end_function_call>", "",
         call("look", GEMMA_ARGUMENTS)),
        ("<start_function_call>call:look<end_function_call>", "", call("look", "{}")),
        (GEMMA_TWO, "",
         call("look", "{}") + call("see", '{"a": [1]}')),
        ("<start_function_call>look<end_function_call>",
         "<start_function_call>look<end_function_call>", []),
    ],
    "gemma4": [
        ("<|tool_call>call:look" + GEMMA.replace("Q", '<|"|>') + "<tool_call|>", "",
         call("look", GEMMA_ARGUMENTS)),
        ("<|channel>thought\nHm.\n<channel|>Yes.", "Yes.", thought("Hm.")),
    ],
    "pythonic": [
        ("[look(city='Oslo', days=[1, 2], deep={\"a\": None, 'b': True}), see()]", "",
         call("look", '{"city": "Oslo", "days": [1, 2], "deep": {"a": null, "b": true}}')
         + call("see", "{}")),
        (r"<|python_tag|>[look(a='it\'s \u00e9\n', b=-1.5e3)]", "",
         call("look", json.dumps({"a": "it's é\n", "b": -1500.0}, ensure_ascii=False))),
        ("[1] is a reference", "[1] is a reference", []),
        ("See [look(a=1)]", "See [look(a=1)]", []),
        ("[look(a=open('x'))]", "[look(a=open('x'))]", []),
    ],
    "think": [("<think>\nHm.\n</think>\n\nYes.", "Yes.", thought("Hm."))],
    "harmony": [
        (f"{CHANNEL}final{MESSAGE}Hello.", "Hello.", []),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{NEXT}final{MESSAGE}Yes.", "Yes.", thought("Hm.")),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{NEXT}{TO_LOOK}", "", thought("Hm.") + call("look")),
        (f" to=functions.look{CHANNEL}commentary <|constrain|>json{MESSAGE}{HEAD}<|call|>", "",
         call("look")),
        (f"{CHANNEL}commentary to=functions.f{MESSAGE}{MARKED}<|call|>", "", call("f", MARKED)),
        (f"{CHANNEL}commentary to=functions.f{MESSAGE}", "", call("f", "{}")),
        (f"{CHANNEL}commentary{MESSAGE}First.{NEXT}final{MESSAGE}Then.", "First.Then.", []),
    ],
}  # fmt: skip
IN_STRINGS = [
    (f"{CALL_F}{MARKED}}}</tool_call> <tool_call>{BODY}</tool_call>.", ".",
     call("f", MARKED) + call("look")),
    (f'{CALL_F}{{"x": "a</tool_call>b', "b", broken('{"x": "a', '{"x": "a</tool_call>')),
    (f'{CALL_F}{{"x": "a</tool_call>b" ', 'b" ', broken('{"x": "a', '{"x": "a</tool_call>')),
    (f'{CALL_F}{{"x": "a</tool_call>\n<tool_call>{BODY}</tool_call> "b"', ' "b"',
     broken('{"x": "a', '{"x": "a</tool_call>') + call("look")),
    (f'{CALL_F}{{"x": 5</tool_call>"b", ', '"b", ', broken('{"x": 5', '{"x": 5</tool_call>')),
    (f'{CALL_F}{{\\"x": "a</tool_call>b"}}', 'b"}',
     broken('{\\"x": "a', '{\\"x": "a</tool_call>')),
]  # fmt: skip
"""Marks in strings: one ends the call where the string does not end as one of JSON. The oracle
takes all of them for marks."""
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]
ALL += [("hermes", *case) for case in IN_STRINGS]


@pytest.mark.parametrize(("name", "text", "content", "events"), ALL)
def test_every_way_to_cut_a_text_gives_the_same(of_kind, name, text, content, events):
    tokenizer = of_kind(name)
    schemas = {"look": {"properties": {"days": {"type": "array"}, "city": {"type": "string"}}}}
    prompt = cut(tokenizer, "<|start|>assistant" if name == "harmony" else "\n", None)
    for seed in (None, *range(40)):
        ids = cut(tokenizer, text, None if seed is None else random.Random(seed))
        found = read(tokenizer, FORMATS[name], ids, prompt=prompt, schemas=schemas)
        assert found[:2] == (content, events), seed


MIXED = "First. {0}\nAnd then {0}{0} text.\n"
PARTS = ["First.", "look", " \nAnd then", "look", "look", "  text.\n"]


@pytest.mark.parametrize("name", ["hermes", "gemma4", "deepseek"])
def test_text_and_calls_keep_their_order_however_they_are_cut(of_kind, name):
    written = next(t for t, content, events in CASES[name] if not content and len(events) == 3)
    tokenizer, text = of_kind(name), MIXED.format(written)
    for seed in (None, *range(20)):
        rng = random.Random(seed)
        reader = Reader(tokenizer, FORMATS[name], reads_calls=True)
        events, content = [], ""
        for token in cut(tokenizer, text, None if seed is None else rng):
            content += reader.push(token)
            if rng.random() < 0.3:
                size = rng.randrange(len(content) + 1)  # the rest may be a stop string's beginning
                events += reader.take(size).events
                content = content[size:]
        content += reader.flush(is_cut=False)
        events += reader.take(len(content), is_last=True).events
        said = [e.text for e in joined(events) if e.kind in ("content", "call")]
        assert said == PARTS, seed
        assert all(text[e.at :].startswith(e.text) for e in events if e.kind == "content")


def test_every_format_has_its_cases():
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize("name", ["hermes", "think"])
def test_reasoning_that_the_prompt_has_opened(of_kind, name):
    tokenizer = of_kind(name)
    prompt = cut(tokenizer, "<|im_start|>assistant\n<think>\n", None)
    ids = cut(tokenizer, "Hm.\n</think>\n\nYes.", None)
    content, events, reading = read(tokenizer, FORMATS[name], ids, prompt=prompt)
    assert (content, events) == ("Yes.", thought("Hm."))
    assert 3 <= reading.num_reasoning_tokens <= len("Hm.\n</think>")
    closed = cut(tokenizer, "<think>\n\n</think>\n\n", None)
    assert read(tokenizer, FORMATS[name], ids[:3], prompt=closed)[0] == "Hm."


@pytest.mark.parametrize(
    ("name", "begun", "rest"),
    [
        ("hermes", '<tool_call>{"name": "look"', "}"), ("mistral", "[TOOL_CALLS]look", "[ARGS]"),
        ("deepseek", f"{DEEP}look", DEEP_SEP), ("llama3_json", '{"name": "look"', "}"),
        ("gemma", "<start_function_call>call:look", "{}"),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_before_its_arguments_has_none(of_kind, name, begun, rest):
    tokenizer = of_kind(name)
    ids = cut(tokenizer, begun, None)
    found = read(tokenizer, FORMATS[name], ids, schemas={"look": {}}, is_cut=True)
    assert found[:2] == (begun, [])
    ids = cut(tokenizer, begun + rest, None)
    _, events, _ = read(tokenizer, FORMATS[name], ids, schemas={"look": {}}, is_cut=True)
    assert not [each for each in events if each.kind == "arguments"]
    _, events, _ = read(tokenizer, FORMATS[name], ids, schemas={"look": {}})
    assert events == call("look", "{}")


@pytest.mark.parametrize("name", ["hermes", "think"])
@pytest.mark.parametrize("text", ["It is 5.", "  \nSo.\n\nIt is <5> </think", "5 < 6 <tool_"])
def test_reasoning_that_the_prompt_has_opened_and_nothing_closes_is_the_answer(of_kind, name, text):
    tokenizer = of_kind(name)
    prompt = cut(tokenizer, "<|im_start|>assistant\n<think>\n", None)
    for seed in (None, *range(9)):
        ids = cut(tokenizer, text, None if seed is None else random.Random(seed))
        content, events, _ = read(tokenizer, FORMATS[name], ids, prompt=prompt)
        assert (content, events) == (text.lstrip("\n"), thought(text.strip())), seed
        content, events, _ = read(tokenizer, FORMATS[name], ids, prompt=prompt, is_cut=True)
        assert (content, events) == ("", thought(text.strip())), seed


def test_calls_within_reasoning_that_nothing_closes_are_calls(of_kind):
    tokenizer = of_kind("hermes")
    prompt = cut(tokenizer, "<|im_start|>assistant\n<think>\n", None)
    text = f"I look.\n<tool_call>{BODY}</tool_call>"
    content, events, reading = read(
        tokenizer, FORMATS["hermes"], cut(tokenizer, text, None), prompt=prompt
    )
    assert (content, events, reading.num_calls) == ("I look.", [*thought(text), *call("look")], 1)


def test_without_tools_a_call_is_text(of_kind):
    text = f"<tool_call>{BODY}</tool_call>"
    tokenizer = of_kind("hermes")
    ids = cut(tokenizer, text, None)
    assert read(tokenizer, FORMATS["hermes"], ids, tools=False)[:2] == (text, [])


def test_arguments_come_as_they_are_written(of_kind):
    tokenizer = of_kind("hermes")
    reader = Reader(tokenizer, FORMATS["hermes"], reads_calls=True)
    pieces = []
    for token in cut(tokenizer, f"<tool_call>{BODY}</tool_call>", None):
        reader.push(token)
        pieces += [each.text for each in reader.take(0).events if each.kind == "arguments"]
    assert "".join(pieces) == HEAD
    assert len(pieces) > len(HEAD) // 2


def test_a_cut_call_keeps_what_was_written(of_kind):
    tokenizer = of_kind("hermes")
    ids = cut(tokenizer, CALL_F + '{"a": [1, ', None)
    content, events, reading = read(tokenizer, FORMATS["hermes"], ids)
    assert content == "" and reading.num_calls == 0
    assert events == broken('{"a": [1, ', '{"a": [1, ')


def test_g7_a_million_characters_take_linear_time(of_kind):
    tokenizer = of_kind("embedded")
    for text in ("<tool_call>" + "x" * 300_000, f"<tool_call>{BODY[:-2]}" + '[{"' * 100_000):
        ids = tokenizer.encode(text)
        started = time.perf_counter()
        half = len(ids) // 2
        reader = Reader(tokenizer, FORMATS["hermes"], reads_calls=True)
        for token in ids[:half]:
            reader.push(token)
        first = time.perf_counter() - started
        for token in ids[half:]:
            reader.push(token)
        assert time.perf_counter() - started < 4 * first + 1


@pytest.mark.parametrize(
    ("name", "begun", "unit"),
    [
        ("hermes", CALL_F + '{"x": "', "</tool_call>xyz"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"', '[TOOL_CALLS]f[ARGS]{\\"'),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)  # as long as all others
            for case in (
                ("mistral", "", '[TOOL_CALLS]f[ARGS]{",":":",":"'),
                ("hermes", "", CALL_F + '{"x": "</tool_call>'),
            )
        ),
    ],
)
def test_g7_marks_in_strings_that_never_end_take_linear_time(of_kind, name, begun, unit):
    tokenizer, took_s = of_kind("embedded"), []
    for count in (4000, 16_000):
        ids = tokenizer.encode(begun) + tokenizer.encode(unit) * count
        started = time.perf_counter()
        read(tokenizer, FORMATS[name], ids)
        took_s.append(time.perf_counter() - started)
    assert took_s[1] < 8 * took_s[0] + 1


RUNS = "__import__('os').system('touch PATH')"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", f"[look(a={RUNS})]"), ("pythonic", f"[{RUNS}]"),
        ("pythonic", f"[look(a=eval(\"{RUNS}\"))]"), ("pythonic", f"[look(a=[{RUNS} for x in y])]"),
        ("gemma", f"<start_function_call>call:look{{a:{RUNS}}}<end_function_call>"),
        ("qwen3_coder", f"<tool_call>{RUNS}</tool_call>"),
    ],
)  # fmt: skip
def test_g7_code_is_content_and_never_run(of_kind, tmp_path, name, text):
    tokenizer, text = of_kind(name), text.replace("PATH", str(tmp_path / "made"))
    found = read(tokenizer, FORMATS[name], cut(tokenizer, text, None), prompt=[65])
    assert found[:2] == (text, []) and not list(tmp_path.iterdir())


def test_templates_are_known():
    of = {kind: (found := format_of(text)) and found.name for kind, text in TEMPLATES.items()}
    assert of == {"gpt_oss": "harmony", "llama2": None, "llama3": "llama3_json", "qwen": "think"}


@pytest.mark.parametrize("arguments", [{}, ARGUMENTS, {"nested": {"a": [{"b": None}]}}])
@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_what_the_embedded_template_renders_is_read_back(llm, arguments, num_calls, content):
    tokenizer = llm.tokenizer
    one = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [one] * num_calls},
    ]
    text = render(tokenizer.chat_template, messages).rpartition("<|im_start|>assistant\n")[2]
    ids = tokenizer.encode(text.removesuffix("<|im_end|>\n"))
    format = format_of(tokenizer.chat_template)
    found, events, _ = read(tokenizer, format, ids)
    assert found == content
    assert [e.text for e in events if e.kind == "call"] == ["look"] * num_calls
    written = [json.loads(e.text) for e in events if e.kind == "arguments"]
    assert written == [arguments] * num_calls


def test_what_the_llama3_template_renders_is_read_back(of_kind):
    function = {"name": "look", "arguments": ARGUMENTS}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]
    text = render(TEMPLATES["llama3"], messages, bos_token="").rpartition("<|end_header_id|>\n\n")[
        2
    ]
    tokenizer = of_kind("llama3_json")
    _, events, _ = read(
        tokenizer, FORMATS["llama3_json"], cut(tokenizer, text[: -len("<|eot_id|>")], None)
    )
    assert json.loads(events[1].text) == ARGUMENTS


RESPONSE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
        },
        "content": {},
    },
}  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 7, 8, 11, 12])
def test_equals_transformers_parser(of_kind, number):
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    text = CASES["hermes"][number][0]
    theirs = chat_parsing.parse_response(text, RESPONSE, prefix="")
    tokenizer = of_kind("hermes")
    content, events, _ = read(tokenizer, FORMATS["hermes"], cut(tokenizer, text, None))
    reasoning = "".join(e.text for e in events if e.kind == "reasoning").strip()
    names = [e.text for e in events if e.kind == "call"]
    arguments = [json.loads(e.text) for e in events if e.kind == "arguments"]
    wanted = theirs.get("tool_calls", [])
    assert names == [c["name"] for c in wanted]
    assert [
        json.loads(a) if isinstance(a := c["arguments"], str) else a for c in wanted
    ] == arguments
    if "x <think>" not in text:  # reasoning comes first; theirs may come anywhere
        assert reasoning == theirs.get("thinking", "")
        assert content.strip() == theirs.get("content", "")


def test_the_table_of_states_is_the_readers():
    page = (Path(__file__).parents[3] / "docs/server.md").read_text(encoding="utf-8")
    states = "|".join({state for state, _ in TRANSITIONS})
    table = re.findall(rf"^\| ({states}) \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
    drawn = {
        (state, each.rpartition(": ")[0]): each.rpartition(": ")[2]
        for state, cell in table
        for each in cell.split("; ")
    }
    assert drawn == TRANSITIONS
