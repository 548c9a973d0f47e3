"""/v1/responses and /v1/messages: their own clients against a real engine, and a scripted one's
words; and bodies of every route that hold anything anywhere."""

from __future__ import annotations

import json
import random
import re

import anthropic
import pytest

from rooflax.models.presets import CHAT_NAME
from rooflax.server.app import POSTS
from tests.engine.product.test_embedded_chat import TOOL
from tests.support.server.live import ScriptedLLM, serving

pytestmark = pytest.mark.oldest_jax

QUESTION = "What is the weather in Oslo?"
FUNCTION = TOOL["function"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def anthropic_client(served):
    given = {"base_url": served.url, "api_key": "any", "max_retries": 0}
    with anthropic.Anthropic(**given, _strict_response_validation=True) as found:
        yield found


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


LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object"}}
NAMED = {"name": "look", "input_schema": {"type": "object"}}
TOOLS = {"/v1/responses": [FLAT], "/v1/messages": [NAMED]}
TOOLS["/v1/chat/completions"] = [{"type": "function", "function": {"name": "look"}}]


def asking(path, **more):
    messages = [{"role": "user", "content": "x"}]
    beside = {"/v1/responses": {"input": "x"}, "/v1/messages": {"max_tokens": 200}}
    given = {"messages": messages} if path != "/v1/responses" else {}
    return given | beside.get(path, {}) | {"tools": TOOLS[path]} | more


def blocks(path, document):
    """Kinds and texts of an answer, in their order."""
    if path == "/v1/chat/completions":
        message = document["choices"][0]["message"]
        return [message["content"], *[c["function"]["name"] for c in message["tool_calls"]]]
    if path == "/v1/responses":
        return [
            each["content"][0]["text"] if "content" in each else each["name"]
            for each in document["output"]
        ]
    return [each.get("text", each.get("name")) for each in document["content"]]


def events_of(answer):
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed_blocks(live, path):
    """The same, put together from a stream."""
    events = events_of(live.post(path, asking(path, stream=True)))
    if path == "/v1/messages":
        found = [
            each["content_block"].get("name", "")
            for each in events if each["type"] == "content_block_start"
        ]  # fmt: skip
        for each in events:
            if each["type"] == "content_block_delta" and each["delta"]["type"] == "text_delta":
                found[each["index"]] += each["delta"]["text"]
        return found
    if path == "/v1/responses":
        found = [
            each["item"].get("name", "")
            for each in events if each["type"] == "response.output_item.added"
        ]  # fmt: skip
        for each in events:
            if each["type"] == "response.output_text.delta":
                found[each["output_index"]] += each["delta"]
        return found
    text, names = "", []
    for choice in (choice for each in events for choice in each["choices"]):
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            names += [name] if (name := call["function"].get("name")) else []
    return [text, *names]


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("is_merged", [False, True])
def test_text_on_both_sides_of_a_call_keeps_its_place(live, scripted, path, is_merged):
    scripted.script, scripted.is_merged = scripted.says(f"First. {LOOK}\nAnd then text."), is_merged
    wanted = ["First.", "look", " \nAnd then text."]
    if path == "/v1/chat/completions":
        wanted = ["First. \nAnd then text.", "look"]
    assert blocks(path, live.post(path, asking(path)).json()) == wanted
    assert streamed_blocks(live, path) == wanted


def spelled(logprobs):
    assert all(bytes(one["bytes"]).decode("utf-8", "replace") == one["token"] for one in logprobs)
    return b"".join(bytes(one["bytes"]) for one in logprobs).decode()


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ("Hi 😀 日本 there", ["Hi 😀 日本 there"]),
        ("One.\n\n  Two\n", ["One.\n\n  Two\n"]),
        ("<think>Hm so.</think>\n\nYes 😀", ["Yes 😀"]),
        (f"First. {LOOK}\nAnd then.", ["First.", " \nAnd then."]),
        ("<tool_call>no</tool_call> 😀", ["<tool_call>no</tool_call> 😀"]),
    ],
)
def test_logprobs_of_responses_spell_the_text(live, scripted, is_merged, said, texts):
    scripted.script, scripted.is_merged = scripted.says(said), is_merged
    body = {"input": "x", "tools": [FLAT], "include": ["message.output_text.logprobs"]}
    output = live.post("/v1/responses", body).json()["output"]
    parts = [each["content"][0] for each in output if each["type"] == "message"]
    assert [part["text"] for part in parts] == texts
    assert [spelled(part["logprobs"]) for part in parts] == texts
    events = events_of(live.post("/v1/responses", body | {"stream": True}))
    of_deltas = [
        one
        for each in events if each["type"] == "response.output_text.delta"
        for one in each["logprobs"]
    ]  # fmt: skip
    assert spelled(of_deltas) == "".join(texts)
    done = [e for e in events if e["type"] == "response.output_text.done"]
    assert [spelled(each["logprobs"]) for each in done] == texts


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("Hello, world.", [], "Hello, world."),
        ("one two three four", ["ree"], "one two th"),
        ("one 😀 two", ["😀"], "one "),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one two", ["two three"], "one two"),
    ],
)
def test_logprobs_of_chat_end_with_the_text(live, scripted, is_merged, stream, said, stop, text):
    scripted.script, scripted.is_merged = scripted.says(said), is_merged
    path = "/v1/chat/completions"
    found = live.post(path, asking(path, logprobs=True, stop=stop, stream=stream))
    documents = events_of(found) if stream else [found.json()]
    choices = [choice for each in documents for choice in each["choices"]]
    said = [c.get("message", c.get("delta")).get("content") or "" for c in choices]
    assert "".join(said) == text
    assert spelled([t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]) == text


NINE = (
    "{# [ARGS] #}{% for m in messages %}{{ '<|im_start|>' + m.role + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "{{ '[TOOL_CALLS]' + c.id }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}"
)


def test_ids_of_calls_are_those_that_the_template_takes(live, scripted, monkeypatch):
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": NINE})
    scripted.script = scripted.says("[TOOL_CALLS]look[ARGS]{}")
    (call,) = live.post("/v1/responses", asking("/v1/responses")).json()["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12"}
    again = [{"role": "user", "content": "x"}, call, result]
    assert live.post("/v1/responses", asking("/v1/responses", input=again)).status_code == 200
    use = live.post("/v1/messages", asking("/v1/messages")).json()["content"]
    result = {"type": "tool_result", "tool_use_id": use[0]["id"], "content": "12"}
    again = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": use},
        {"role": "user", "content": [result]},
    ]
    assert live.post("/v1/messages", asking("/v1/messages", messages=again)).status_code == 200
    assert len(call["call_id"]) == len(use[0]["id"]) == 9
    use[0]["id"] = result["tool_use_id"] = "toolu_of_another"
    for _ in range(2):
        assert live.post("/v1/messages", asking("/v1/messages", messages=again)).status_code == 200
    first, second = (scripted.llm.tokenizer.decode(asked[0]) for asked in scripted.asked[-2:])
    (identity,) = re.findall(r"\[TOOL_CALLS\](\w{9})", first)
    assert first == second and first.count(identity) == 2


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


def reported(found):
    assert found.status_code == 200, found.text
    return set(filter(None, found.headers.get("x-rooflax-ignored", "").split(", ")))


TELLS_EFFORTS = "{{ reasoning_effort }} {% for m in messages %}{{ m.role + m.content }}{% endfor %}"
TELLS_THINKING = TELLS_EFFORTS.replace("reasoning_effort", "enable_thinking")


@pytest.mark.parametrize(
    ("template", "path", "fields", "begins", "names"),
    [
        (TELLS_EFFORTS, "/v1/responses", {"reasoning": {"effort": "low"}}, "low", set()),
        (TELLS_EFFORTS, "/v1/responses", {"reasoning": {"effort": "minimal"}}, "",
         {"reasoning.effort"}),
        (TELLS_EFFORTS, "/v1/responses", {"reasoning": {"effort": "none"}}, "",
         {"reasoning.effort"}),
        (TELLS_THINKING, "/v1/responses", {"reasoning": {"effort": "none"}}, "False", set()),
        (TELLS_EFFORTS, "/v1/messages", {"thinking": {"type": "disabled"}}, "", {"thinking"}),
        (TELLS_THINKING, "/v1/messages", {"thinking": {"type": "disabled"}}, "False", set()),
        (TELLS_THINKING, "/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}},
         "True", {"thinking.budget_tokens"}),
        (TELLS_THINKING, "/v1/messages", {"thinking": {"type": "between_tools"}}, "",
         {"thinking"}),
        (TELLS_EFFORTS, "/v1/messages", {"output_config": {"effort": "low"}}, "low", set()),
        (TELLS_EFFORTS, "/v1/messages", {"output_config": {"effort": "max"}}, "",
         {"output_config.effort"}),
        (TELLS_EFFORTS, "/v1/messages",
         {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low", set()),
    ],
)  # fmt: skip
def test_efforts_that_a_template_cannot_be_told_are_reported(
    live, scripted, monkeypatch, template, path, fields, begins, names
):
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": template})
    found = live.post(path, asking(path, **fields) | {"tools": []})
    assert reported(found) == names
    assert scripted.llm.tokenizer.decode(scripted.asked[-1][0]).startswith(f"{begins} user")


def test_what_coding_clients_send(live, scripted):
    given = {"max_tokens": 9, "messages": [
        {"role": role, "content": role} for role in ("ctx", "user", "msg")
    ]}  # fmt: skip
    tool = {**NAMED, "defer_loading": True, "cache_control": {"type": "ephemeral"}, "novel": 1}
    found = live.post("/v1/messages", given | {"tools": [tool]})
    assert reported(found) == {"tools[0].defer_loading", "tools[0].novel"}
    asked = scripted.llm.tokenizer.decode(scripted.asked[-1][0], skip_special_tokens=False)
    assert asked.count("<|im_start|>user") == 3
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    assert reported(live.post("/v1/messages", given | {"output_config": form})) == set()
    assert scripted.asked[-1][1].json_schema == json.dumps(schema)


def test_a_request_that_takes_too_long_is_an_error_of_anthropics(llm):
    scripted = ScriptedLLM(llm)
    scripted.pause_s = 0.5
    with serving(lambda _: scripted, request_s=0.1) as server:
        found = server.post("/v1/messages", asking("/v1/messages"))
    assert (found.status_code, found.json()["error"]["type"]) == (504, "timeout_error")


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
        ("/v1/messages", {"messages": [], "max_tokens": 5, "thinking": {"type": "banana"}},
         "thinking.type"),
        ("/v1/messages", {"messages": [], "max_tokens": 5, "output_config": {"format": {}}},
         "output_config.format.type"),
        ("/v1/responses", {"input": "x", "top_logprobs": 3}, "top_logprobs"),
        *[("/v1/responses", {"input": "x", "tool_choice": choice}, "tool_choice")
          for choice in ("banana", "required", {"type": "function", "name": "f"})],
        *[("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5,
                            "tool_choice": choice}, "tool_choice")
          for choice in ({"type": "banana"}, {"type": "any"}, {"type": "tool", "name": "f"})],
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


for each in ("load", "unload"):  # which this server does not allow; test_loras.py has one that does
    BODIES[f"/v1/{each}_lora_adapter"] = {"lora_name": "x", "lora_path": "y"}
BODIES["/v1/responses/input_tokens"] = {
    name: value for name, value in BODIES["/v1/responses"].items() if name != "include"
}


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_fault_of_ours(live, path):
    pooling = {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank"}  # in test_embeddings.py
    assert set(BODIES) == set(POSTS) - pooling
    rng = random.Random(path)
    for _ in range(300):
        body = BODIES[path]
        for _ in range(rng.choice((1, 1, 2, 3))):
            body = mutated(body, rng)
        headers = {"content-type": "application/json"}
        found = live.http.post(path, content=json.dumps(body), headers=headers)
        assert found.status_code in (200, 400, 404), (body, found.text)
