"""/v1/responses and /v1/messages: their own clients against a real engine, and a scripted one's
words; and bodies of every route that hold anything anywhere."""

from __future__ import annotations

import json
import random

import anthropic
import openai
import pytest

from rooflax import LLM, AsyncLLM
from rooflax.models.presets import CHAT_NAME
from rooflax.server.app import POSTS
from tests.product.test_embedded_chat import TOOL
from tests.server.live import serving

pytestmark = pytest.mark.oldest_jax

QUESTION = "What is the weather in Oslo?"
FUNCTION = TOOL["function"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served():
    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4)) as server:
        yield server


@pytest.fixture(scope="module")
def strict(served):
    given = {"base_url": f"{served.url}/v1", "api_key": "any", "max_retries": 0}
    with openai.OpenAI(**given, _strict_response_validation=True) as found:
        yield found


@pytest.fixture(scope="module")
def anthropic_client(served):
    given = {"base_url": served.url, "api_key": "any", "max_retries": 0}
    with anthropic.Anthropic(**given, _strict_response_validation=True) as found:
        yield found


@pytest.fixture(scope="module")
def alone():
    return LLM(CHAT_NAME)


def test_responses_whole_and_streamed(strict, alone):
    wanted = alone.chat([{"role": "user", "content": "Who are you?"}], max_tokens=60)[0]
    found = strict.responses.create(model=CHAT_NAME, input="Who are you?", max_output_tokens=60)
    assert found.output_text == wanted.text
    assert (found.status, found.store) == ("completed", False)
    assert found.usage.output_tokens == len(wanted.tokens)
    events = list(
        strict.responses.create(
            model=CHAT_NAME, input="Who are you?", max_output_tokens=60, stream=True
        )
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events if not e.type.endswith(".delta")]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == wanted.text == events[-1].response.output_text


def test_responses_call_a_tool_and_take_its_answer(strict):
    tool = {"type": "function", "strict": False, **FUNCTION}
    found = strict.responses.create(model=CHAT_NAME, input=QUESTION, tools=[tool])
    (call,) = found.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Oslo"},
    )  # fmt: skip
    given = [
        {"role": "user", "content": QUESTION},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 7}'},
    ]
    found = strict.responses.create(model=CHAT_NAME, input=given, tools=[tool])
    assert found.output_text


def test_responses_of_a_schema_and_cut_ones(strict):
    schema = {
        "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    found = strict.responses.create(model=CHAT_NAME, input="Hi", text={"format": form})
    assert json.loads(found.output_text)["a"] in ("x", "y")
    found = strict.responses.create(model=CHAT_NAME, input="Who are you?", max_output_tokens=3)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"


def test_messages_whole_and_streamed(anthropic_client, alone):
    wanted = alone.chat([{"role": "user", "content": "Who are you?"}], max_tokens=60)[0]
    given = {"model": CHAT_NAME, "max_tokens": 60}
    given["messages"] = [{"role": "user", "content": "Who are you?"}]
    found = anthropic_client.messages.create(**given)
    assert (found.content[0].text, found.stop_reason) == (wanted.text, "end_turn")
    usage = found.usage
    assert usage.output_tokens == len(wanted.tokens)
    assert usage.input_tokens + usage.cache_read_input_tokens == len(wanted.prompt_tokens)
    with anthropic_client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == wanted.text
        assert stream.get_final_message().content[0].text == wanted.text
    counted = anthropic_client.messages.count_tokens(model=CHAT_NAME, messages=given["messages"])
    assert counted.input_tokens == len(wanted.prompt_tokens)


def test_messages_call_a_tool_and_take_its_answer(anthropic_client):
    tool = {"name": "get_weather", "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"]}  # fmt: skip
    given = {"model": CHAT_NAME, "max_tokens": 100, "tools": [tool]}
    asked = [{"role": "user", "content": QUESTION}]
    with anthropic_client.messages.stream(**given, messages=asked) as stream:
        found = stream.get_final_message()
    (block,) = found.content
    assert (block.type, block.input, found.stop_reason) == (
        "tool_use",
        {"city": "Oslo"},
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": block.id, "content": '{"temperature": 7}'}
    messages = [
        *asked,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    assert anthropic_client.messages.create(**given, messages=messages).content[0].text
    forced = anthropic_client.messages.create(**given, messages=asked, tool_choice={"type": "any"})
    assert forced.content[0].type == "tool_use"


def test_messages_errors_are_anthropics(anthropic_client, served):
    with pytest.raises(anthropic.BadRequestError) as caught:
        anthropic_client.messages.create(model=CHAT_NAME, max_tokens=10, messages=[])
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="anthropic_client", max_tokens=10, messages=[])
    found = served.post("/v1/messages", {"messages": []})
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_reasoning_text_and_calls_are_items_in_their_order(live, scripted):
    scripted.script = scripted.says("<think>\nHm.\n</think>\n\nI look.\n" + CALL)
    tool = {"type": "function", **FUNCTION}
    found = live.post("/v1/responses", {"input": QUESTION, "tools": [tool]}).json()
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert found["output"][1]["content"][0]["text"] == "I look."
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 1
    tool = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 99, "tools": [tool]}
    found = live.post("/v1/messages", body).json()
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
    assert found["content"][2]["input"] == {"city": "Oslo"}
    assert found["stop_reason"] == "tool_use"


def test_a_history_is_rendered_as_a_chats(live, scripted):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "user", "content": "So?"},
    ]
    live.post("/v1/chat/completions", {"messages": chat})
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": "Well"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"role": "user", "content": "So?"},
    ]
    live.post("/v1/responses", {"input": given, "instructions": "Be brief."})
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]}
    given = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    live.post("/v1/messages", {"messages": given, "system": "Be brief.", "max_tokens": 9})
    first, second, third = (prompt for prompt, _, _ in scripted.asked)
    assert first == second == third


def test_what_is_passed_over_is_reported(live):
    body = {"input": "Hi", "tools": [{"type": "web_search"}], "novel": 1,
            "reasoning": {"effort": "high"}, "store": True}  # fmt: skip
    found = live.post("/v1/responses", body)
    assert found.status_code == 200
    ignored = found.headers["x-rooflax-ignored"].split(", ")
    assert set(ignored) == {"tools[0].type=web_search", "novel", "reasoning.effort"}
    body = {"messages": [{"role": "user", "content": "Hi", "ctx": 1}], "max_tokens": 5,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 5"}],
            "tools": [{"type": "bash_20250124", "name": "bash"}],
            "thinking": {"type": "enabled", "budget_tokens": 5}}  # fmt: skip
    found = live.post("/v1/messages", body)
    ignored = found.headers["x-rooflax-ignored"].split(", ")
    assert set(ignored) == {
        "messages[0].ctx", "system.billing_header", "tools[0].type=bash_20250124", "thinking",
    }  # fmt: skip


def test_prefills_and_stop_sequences(live, scripted):
    scripted.script = scripted.says(" am here. Or there.")
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I"}],
            "max_tokens": 50, "stop_sequences": ["Or"]}  # fmt: skip
    found = live.post("/v1/messages", body).json()
    assert found["content"][0]["text"] == " am here. "
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "Or")
    text = scripted.llm.tokenizer.decode(scripted.asked[-1][0])
    assert text.endswith("assistant\nI")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_an_error_within_a_stream_has_their_shape(live, scripted, path):
    scripted.error = (2, ValueError("broken"))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True}
    if path == "/v1/responses":
        body = {"input": "Hi", "stream": True}
    last = live.post(path, body).text.split("\n\n")[-2]
    kind, data = last.split("\n")
    found = json.loads(data.removeprefix("data: "))
    if path == "/v1/responses":
        assert kind == "event: response.failed" and found["response"]["status"] == "failed"
    else:
        assert kind == "event: error" and found["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ("/v1/responses", {"input": "x", "previous_response_id": "y"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}],
                          "max_tokens": 5}, "messages[0]"),
        ("/v1/messages", {"messages": [], "max_tokens": 5, "container": "x"}, "container"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(live, path, body, param):
    found = live.post(path, body)
    assert found.status_code == 400
    said = found.json()["error"]
    assert said.get("param") == param or param in said["message"]


BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "response_format": {"type": "text"}, "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": "x"},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "x"},
                  {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}],
        "tools": [{"type": "function", **FUNCTION},
                  {"type": "namespace", "name": "n", "tools": []}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": ["x"],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
                     {"role": "assistant", "content": [
                         {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                         {"type": "thinking", "thinking": "x"}]}],
        "max_tokens": 5, "system": [{"type": "text", "text": "x"}], "thinking": {"type": "enabled"},
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}], "documents": [{}]},
}  # fmt: skip
VALUES = [
    None,
    True,
    0,
    -1,
    2.5,
    2**70,
    "",
    "x",
    [],
    [None],
    [[]],
    [{}],
    {},
    {"a": 1},
    {"type": []},
]


def mutated(value, rng):
    """The same with something in it replaced, dropped or added."""
    if rng.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        found = {**value, key: mutated(value[key], rng)}
        if rng.random() < 0.1:
            del found[key]
        return found
    at = rng.randrange(len(value))
    return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_fault_of_ours(live, path):
    pooling = {"/v1/embeddings", "/v1/rerank", "/rerank"}  # in test_embeddings.py
    assert set(BODIES) == set(POSTS) - pooling
    rng = random.Random(path)
    for _ in range(300):
        body = BODIES[path]
        for _ in range(rng.choice((1, 1, 2, 3))):
            body = mutated(body, rng)
        headers = {"content-type": "application/json"}
        found = live.http.post(path, content=json.dumps(body), headers=headers)
        assert found.status_code in (200, 400, 404), (body, found.text)
