"""A checkpoint's own response_template: read as transformers reads it, or rejected with a reason.

The oracle is transformers' parser of the same template.
"""

from __future__ import annotations

import json
import logging
import random

import pytest

from rooflax.server.call_formats import formats
from rooflax.server.call_formats.response_template import Unreadable, read_response_template
from tests.engine.server.test_tools import CHAT, MESSAGES, tool
from tests.unit.server.test_reader import cut, of_kind, read  # noqa: F401

THINK = {"open": "<think>", "close": "</think>"}
OBJECT = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def spec(calls, thinking=THINK):
    fields = {"thinking": thinking, "content": {}, "tool_calls": {"repeats": True, **calls}}
    return {"start_anchor": "<|im_start|>assistant\n",
            "fields": {k: v for k, v in fields.items() if v is not None}}  # fmt: skip


ONE = '{"name": "look", "arguments": {"city": "Oslo", "days": [1, 2]}}'
BODY = '{"city": "Oslo", "days": [1, 2]}'
CASES = {
    "object": (
        spec({"open": "<tool_call>", "close": "</tool_call>", "content": "json",
              "transform": OBJECT}),
        f"<think>\nHm.\n</think>\n\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>",
    ),
    "other marks": (
        spec({"open": "<<call>>", "close": "<</call>>", "content": "json", "transform": OBJECT},
             {"open": "[[", "close": "]]"}),
        f"[[Hm.]]Well.<<call>>{ONE}<</call>>",
    ),
    "named": (
        spec({"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", "close": "[END]",
              "content": "json", "transform": NAMED}),
        f"Well.[TOOL_CALLS]look[ARGS]{BODY}[END][TOOL_CALLS]see[ARGS]{{}}[END]",
    ),
    "quotes": (
        spec({"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>",
              "content": "json", "transform": NAMED,
              "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}}),
        '<|tool_call>call:look{city:<|"|>Oslo, {x}<|"|>,days:[1,2]}<tool_call|>',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_reads_what_transformers_reads(of_kind, name):  # noqa: F811
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template, text = CASES[name]
    theirs = chat_parsing.parse_response(text, template, prefix="")
    functions = [call["function"] for call in theirs["tool_calls"]]
    tokenizer, format = of_kind("hermes"), read_response_template(template)
    for seed in (None, *range(20)):
        ids = cut(tokenizer, text, None if seed is None else random.Random(seed))
        content, events, reading = read(tokenizer, format, ids)
        names = [each.text for each in events if each.kind == "call"]
        arguments = [json.loads(each.text) for each in events if each.kind == "arguments"]
        assert names == [one["name"] for one in functions]
        assert arguments == [one["arguments"] for one in functions]
        thought = "".join(each.text for each in events if each.kind == "reasoning")
        assert thought == theirs.get("thinking", "")
        assert content.strip() == theirs.get("content", "") and reading.num_failed == 0


def test_what_is_written_as_a_known_format_has_its_grammar():
    known = {each.name: each.calls for each in formats()}
    assert read_response_template(CASES["object"][0]).calls == known["hermes"]
    assert read_response_template(CASES["quotes"][0]).calls == known["gemma4"]
    assert read_response_template(CASES["named"][0]).calls.grammar.before == "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (5, "no fields"),
        ({"version": 2, "fields": {}}, "no fields of version 1"),
        ({"fields": {"images": {}}}, "'images' is not known"),
        (spec({"open": "<a>", "content": "xml-inline"}), "'xml-inline'"),
        (spec({"open": ["<a>", "<b>"], "content": "json"}), "open is not one literal"),
        (spec({"open_pattern": "(a+)+(?P<name>x)b", "content": "json"}), "more than a name"),
        (spec({"open_pattern": "call(?P<name>.*)", "content": "json", "transform": NAMED}),
         "nothing ends"),
        (spec({"open_pattern": "a(?P<name>.*)b", "content": "json"}), "transform"),
        (spec({"open": "<a>", "content": "json", "close_pattern": "x+"}), "close_pattern"),
        (spec({"open": "<a>", "content": "json"}, {"open": "<t>"}), "close is not one literal"),
    ],
)  # fmt: skip
def test_what_is_not_followed_has_a_reason(given, why):
    with pytest.raises(Unreadable, match=why):
        read_response_template(given)


def test_the_checkpoints_own_is_preferred(live, scripted, monkeypatch, caplog):
    template = CASES["other marks"][0]
    tokenizer = live.service.ready().llm.tokenizer

    def ask():
        vars(live.service).pop("_own_format", None)
        answer = live.post(CHAT, {"messages": MESSAGES, "tools": [tool("look")]}).json()
        return answer["choices"][0]["message"]

    scripted.script = scripted.says(CASES["other marks"][1])
    assert "tool_calls" not in ask()
    monkeypatch.setattr(tokenizer, "response_template", template)
    message = ask()
    assert (message["content"], message["reasoning_content"]) == ("Well.", "Hm.")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": BODY}
    monkeypatch.setattr(tokenizer, "response_template", {"fields": {"images": {}}})
    with caplog.at_level(logging.WARNING, "rooflax.server"):
        assert "tool_calls" not in ask()
    assert "is not followed: the field 'images'" in caplog.text
    vars(live.service).pop("_own_format", None)


def test_it_is_read_and_saved_with_the_tokenizer(tmp_path, llm):
    from rooflax.loading.tokenizer import Tokenizer

    for name, data in llm.tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["response_template"] = CASES["object"][0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer(tmp_path)
    assert found.response_template == CASES["object"][0]
    assert b'"response_template"' in found.files()["tokenizer_config.json"]
