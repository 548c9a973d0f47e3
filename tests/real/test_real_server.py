"""A published model through the server: a JSON schema, and tools its template does not show."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rooflax import AsyncLLM
from tests.support.server.live import serving

pytestmark = pytest.mark.xdist_group("smollm2")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of day in a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 40}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(smollm2):
    with serving(lambda _: AsyncLLM(smollm2.path, max_num_seqs=2, max_model_len=1024)) as live:
        yield live


def answer(server, **fields):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 160} | fields
    return server.post("/v1/chat/completions", body)


def test_an_answer_that_a_schema_accepts(server, smollm2, note):
    shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    found = answer(server, response_format=shape)
    assert found.status_code == 200, found.text
    said = found.json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(said), SCHEMA)
    note(smollm2, "JSON schema through the server", said)


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_valid_call_of_a_tool(server, smollm2, note, choice):
    found = answer(server, tools=[CLOCK, WEATHER], tool_choice=choice)
    assert found.status_code == 200, found.text
    (answered,) = found.json()["choices"]
    assert answered["finish_reason"] == "tool_calls"
    (call,) = (call["function"] for call in answered["message"]["tool_calls"])
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    note(smollm2, "tool call through the server", json.dumps(call))


def test_the_result_of_a_call_reaches_the_model(server, smollm2, note):
    call = {"id": "a", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    stored = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": '{"weather": "snow", "celsius": -7}'},
    ]
    found = answer(server, messages=stored, tools=[CLOCK, WEATHER], max_tokens=60)
    said = found.json()["choices"][0]["message"]["content"]
    assert "snow" in said
    note(smollm2, "answer to a tool's result", said)
