"""Forced calls of functions whose schemas no grammar can hold, and sentences that one can follow:
three APIs, streamed and whole, and a real engine."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from rooflax import structured
from tests.engine.server.test_unfinished_answers import APIS, CHAT, MESSAGES, MOST, RESPONSES, ask
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

BEYOND = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "propertyNames": {"type": "object", "propertyNames": {"type": "string"}},
    "pattern": {"type": "string", "pattern": "^(?=.*a)b"},
    "if and then": {"if": {"type": "string"}, "then": {"type": "string"}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    "format": {"type": "string", "format": "banana"},
    "/$defs/none": {"$ref": "#/$defs/none"},
    "Unsatisfiable": {"type": "string", "minLength": 5, "maxLength": 2},
}


def given(path, schema, *, strict=False, choice="required"):
    """Two functions, of which one has the schema."""
    deep = {"type": "object", "properties": {"t": schema}, "required": ["t"]}
    plain = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
             "additionalProperties": False}  # fmt: skip
    tools = [{"name": "ok", "parameters": plain}, {"name": "tag", "parameters": deep}]
    tools[1] |= {"strict": True} if strict else {}
    if path == CHAT:
        named = {"type": "function", "function": {"name": choice}}
        tools = [{"type": "function", "function": each} for each in tools]
    elif path == RESPONSES:
        named = {"type": "function", "name": choice}
        tools = [{"type": "function", **each} for each in tools]
    else:
        named = {"type": "tool", "name": choice}
        tools = [{"input_schema": each.pop("parameters"), **each} for each in tools]
    if choice == "required":
        named = {"type": "any"} if path == MESSAGES else choice
    return {"tools": tools, "tool_choice": named, "temperature": 0, MOST[path]: 60}


@pytest.mark.parametrize(
    ("path", "keyword"),
    cases(
        itertools.product(APIS, BEYOND),
        default=[*((CHAT, keyword) for keyword in BEYOND), *((path, "not") for path in APIS[1:])],
    ),
)
def test_a_function_that_is_not_strict_takes_any_object(served, path, keyword):
    for choice in ("required", "tag"):
        whole = ask(served, path, False, **given(path, BEYOND[keyword], choice=choice))
        assert whole == ask(served, path, True, **given(path, BEYOND[keyword], choice=choice))
        for name, arguments, is_complete in whole.calls:
            assert name in ("ok", "tag") and arguments.startswith("{")
            assert not is_complete or isinstance(json.loads(arguments), dict)
        assert whole.calls or path == MESSAGES  # where a call that was cut is text


@pytest.mark.parametrize("path", APIS)
def test_the_other_functions_keep_their_schemas(served, path):
    for keyword in ("not", "pattern"):
        whole = ask(served, path, False, **given(path, BEYOND[keyword], choice="ok"))
        ((name, arguments, is_complete),) = whole.calls
        assert name == "ok" and is_complete and json.loads(arguments) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("keyword", BEYOND)
@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_function_is_named_with_the_keyword(served, path, keyword, stream):
    asked = {"input" if path == RESPONSES else "messages": [{"role": "user", "content": "x"}]}
    for choice in ("required", "tag"):
        fields = given(path, BEYOND[keyword], strict=True, choice=choice)
        found = served.post(path, {**asked, **fields, "stream": stream})
        said = found.json()["error"]["message"]
        assert found.status_code == 400
        assert "'tag'" in said and keyword in said and "\n" not in said and "at 1(" not in said


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_function_without_parameters_takes_none(served, path):
    fields = given(path, {}, choice="tag")
    for tool in fields["tools"]:
        del tool.get("function", tool)["parameters"]
    ((name, arguments, is_complete),) = ask(served, path, False, **fields).calls
    assert name == "tag" and is_complete and json.loads(arguments) == {}


FOLLOWED = [
    {"anyOf": BEYOND["oneOf"]["oneOf"]},
    {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": each}}, "required": ["kind"]}
        for each in "ab"
    ]},
]  # fmt: skip


def test_the_sentence_on_oneof_can_be_followed(served):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}

    def answer(schema):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return served.post(CHAT, {**body, "response_format": form})

    found = answer(BEYOND["oneOf"])
    said = found.json()["error"]["message"]
    assert found.status_code == 400 and "coerce" not in said
    assert "anyOf" in said and "const" in said and "require" in said
    for schema in FOLLOWED:
        assert answer(schema).status_code == 200


def test_schemas_are_tried_once(served, monkeypatch):
    tried = []
    faults = structured.faults
    monkeypatch.setattr(structured, "faults", lambda some: tried.append(len(some)) or faults(some))
    for length in (3, 3, 4):
        schema = {"type": "array", "uniqueItems": True, "maxItems": length}
        ask(served, CHAT, False, **given(CHAT, schema))
    assert tried[1:] == [1] and tried[0] in (1, 2)
    monkeypatch.setattr("rooflax.server.service.MAX_FAULTS", 3)
    for number in range(8):
        ask(served, CHAT, False, **given(CHAT, {"const": number}))
    assert len(served.service._faults) <= 3


def test_trials_that_take_too_long_are_given_up():
    slow = " & ".join(f"/(.*[a-z]){{{i}}}.*{i}.*/" for i in range(1, 30))
    started = time.monotonic()
    found = structured.faults([f"start: A\nA: {slow}", 'start: "a"'])
    assert len(found) == 2 and all("more than 3 s" in each for each in found)
    assert time.monotonic() - started < 4 * structured.COMPILE_S
