"""A published model through the server: a JSON schema, and tools that its template cannot show."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rooflax import AsyncLLM
from tests.support.server.live import serving

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


def test_tools_that_the_models_template_cannot_show_are_rejected(server):
    found = answer(server, tools=[WEATHER], tool_choice="required")
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "tools_not_supported"
