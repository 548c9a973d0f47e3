"""Conversations as clients store them, which every API takes: broken arguments, results in another
order, late system messages, nulls, and what clients' own objects dump."""

from __future__ import annotations

import itertools
import json

import anthropic
import openai
import pytest

from rooflax import LLM, RequestError
from tests.engine.server.test_apis import CALL, FUNCTION, QUESTION, TOOL

pytestmark = pytest.mark.oldest_jax

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
COUNTS = {MESSAGES: "/v1/messages/count_tokens", RESPONSES: "/v1/responses/input_tokens"}
ABSENT = object()


def call(name, arguments, identity):
    function = {"name": name, "arguments": arguments}
    if arguments is ABSENT:
        del function["arguments"]
    return {"id": identity, "type": "function", "function": function}


def body(path, history):
    """A chat's messages as the body of an API."""
    if path == CHAT:
        return {"messages": history}
    if path == RESPONSES:
        return {"input": list(itertools.chain.from_iterable(map(items, history)))}
    return {"messages": list(map(turn, history)), "max_tokens": 20}


def items(message):
    if message["role"] == "tool":
        found = {"type": "function_call_output", "call_id": message["tool_call_id"]}
        return [{**found, "output": message["content"]}]
    text = [{"role": message["role"], "content": message["content"]}] if message["content"] else []
    calls = [
        {"type": "function_call", "call_id": each["id"], **each["function"]}
        for each in message.get("tool_calls", ())
    ]
    return text + calls


def turn(message):
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [{**block, "content": message["content"]}]}
    blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for each in message.get("tool_calls", ()):
        function = dict(each["function"])
        given = {"input": function.pop("arguments")} if "arguments" in function else {}
        blocks.append({"type": "tool_use", "id": each["id"], "name": function["name"], **given})
    return {"role": message["role"], "content": blocks}


def prompts(live, scripted, path, given):
    """What the engine is asked, streamed and whole; and that it is counted so."""
    scripted.asked.clear()
    for stream in (False, True):
        found = live.post(path, {**given, "stream": stream})
        assert found.status_code == 200, found.text
    (first, _, _), (second, _, _) = scripted.asked
    assert first == second
    if path in COUNTS:
        given = {name: value for name, value in given.items() if name != "max_tokens"}
        counted = live.post(COUNTS[path], given).json()["input_tokens"]
    else:
        counted = live.post("/tokenize", given).json()["count"]
        prompt = live.post("/apply-template", given).json()["prompt"]
        assert prompt == scripted.llm.tokenizer.decode(first, skip_special_tokens=False)
    assert counted == len(first)
    return first


def says(content, *calls):
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
    }


def tool(identity, content):
    return {"role": "tool", "tool_call_id": identity, "content": content}


USER = {"role": "user", "content": "Hi"}
CALLS = [call("f", {"i": each}, each) for each in "abc"]
RESULTS = [tool(each, f"value-{each}") for each in "abc"]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("between", [None, "user", "system"])
def test_results_of_tools_come_in_the_order_of_their_calls(live, scripted, path, order, between):
    late = [{"role": between, "content": "Hurry."}] if between else []
    results = [RESULTS[number] for number in order]
    begun = [USER, says("I look.", *CALLS)]
    ordered = [*begun, *RESULTS, *late]
    found = prompts(live, scripted, path, body(path, [*begun, results[0], *late, *results[1:]]))
    text = scripted.llm.tokenizer.decode(found)
    places = [text.index(f"value-{each}") for each in "abc"]
    assert places == sorted(places)
    assert not late or text.index("Hurry") > places[2]
    assert found == scripted.llm.encode_chat(ordered)
    assert found == scripted.llm.encode_chat([*begun, *results[:2], *late, results[2]])


@pytest.mark.parametrize("path", APIS)
def test_ids_that_come_again_belong_to_the_latest_calls(live, scripted, path):
    again = [says("", call("f", {"i": 2}, "a"), call("f", {"i": 3}, "b"))]
    first = [USER, says("", *CALLS[:2]), *RESULTS[:2]]
    ordered = [*first, *again, tool("a", "later-a"), tool("b", "later-b"), says("So."), USER]
    given = [*first, *again, tool("b", "later-b"), tool("a", "later-a"), says("So."), USER]
    found = prompts(live, scripted, path, body(path, given))
    assert found == prompts(live, scripted, path, body(path, ordered))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("arguments", ["", " \n", None, ABSENT, "{}", "null", '"{}"', {}, '""'])
def test_no_arguments_are_an_empty_object(live, scripted, path, arguments):
    history = [USER, says("", call("now", arguments, "a")), tool("a", "12"), USER]
    found = prompts(live, scripted, path, body(path, history))
    text = scripted.llm.tokenizer.decode(found, skip_special_tokens=False)
    assert '{"name": "now", "arguments": {}}' in text
    assert found == scripted.llm.encode_chat(history)


PLACES = {
    CHAT: "messages[1].tool_calls[1].function.arguments",
    RESPONSES: "input[3].arguments",
    MESSAGES: "messages[1].content[2].input",
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments", ['{"city": "Os', '{"x": 1,}', "Oslo", "[1]", "5", '"Oslo"', "[" * 9999, "{'a': 1}"]
)
def test_arguments_that_do_not_parse_are_said_with_their_place(
    live, scripted, path, stream, arguments
):
    calls = [call("f", "{}", "a"), call("f", arguments, "b")]
    history = [USER, says("I look.", *calls), tool("b", "x"), tool("a", "y")]
    given = body(path, history) | {"stream": stream}
    if path == MESSAGES:  # a message that is put before the others moves no place
        given["system"] = "Be brief."
    found = live.post(path, given)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["message"].startswith(f"{PLACES[path]} is ") and "\n" not in error["message"]
    assert error.get("param", PLACES[path]) == PLACES[path]
    assert not scripted.asked
    with pytest.raises(RequestError, match="JSON of an object") as caught:
        scripted.llm.encode_chat(history)
    assert caught.value.param == PLACES[CHAT]


@pytest.mark.parametrize("path", APIS)
def test_a_result_without_a_call_is_said_with_its_place(live, path):
    given = body(path, [USER, tool("no", "x")])
    if path != CHAT:
        given["instructions" if path == RESPONSES else "system"] = "Be brief."
    place = {CHAT: "messages[1]", RESPONSES: "input[1]", MESSAGES: "messages[1]"}[path]
    found = live.post(path, given)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith(place)


TEMPLATES = {
    "rejects": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}|{% endfor %}"
    ),
    "leaves out": (
        "{% if messages[0].role == 'system' %}system:{{ messages[0].content }}|{% endif %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    ),
    "takes the last": (
        "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.text = 'system:' ~ m.content ~ '|' %}{% endfor %}{{ ns.text }}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    ),
    "alternates": (
        "{% if messages[0].role == 'system' %}system:{{ messages[0].content }}|"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}|{% endfor %}"
    ),
}
ANYWHERE = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
LATE = [
    (["user:a", "assistant:b", "system:S.", "user:c"], "system:S.|user:a|assistant:b|user:c|"),
    (["user:a", "system:S."], "system:S.|user:a|"),
    (["system:S.", "user:a", "assistant:b", "system:T.", "user:c"],
     "system:S.\n\nT.|user:a|assistant:b|user:c|"),
    (["system:S.", "system:T.", "user:a"], "system:S.\n\nT.|user:a|"),
    (["user:a", "system:S.", "assistant:b", "system:T.", "user:c"],
     "system:S.\n\nT.|user:a|assistant:b|user:c|"),
    (["user:a", "developer:S."], "system:S.|user:a|"),
    (["system:S.", "user:a"], "system:S.|user:a|"),
]  # fmt: skip


def conversation(lines):
    return [dict(zip(("role", "content"), line.split(":"), strict=True)) for line in lines]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("lines", "wanted"), LATE)
def test_system_messages_anywhere_become_one_where_the_template_wants_one(
    live, scripted, monkeypatch, path, template, lines, wanted
):
    if path == MESSAGES:  # knows no developer
        lines = [line.replace("developer", "system") for line in lines]
    template, decode = TEMPLATES[template], scripted.llm.tokenizer.decode
    history = conversation(lines)
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": template})
    assert decode(prompts(live, scripted, path, body(path, history))) == wanted
    assert decode(scripted.llm.encode_chat(history)) == wanted
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": ANYWHERE})
    kept = "".join(f"{line}|" for line in lines).replace("developer", "system")
    assert decode(prompts(live, scripted, path, body(path, history))) == kept


@pytest.mark.parametrize("path", APIS)
def test_neighbours_of_one_role_are_joined_where_the_template_wants_turns(
    live, scripted, monkeypatch, path
):
    monkeypatch.setattr(
        scripted.llm.tokenizer, "chat_templates", {"default": TEMPLATES["alternates"]}
    )
    history = conversation(["user:a", "user:b", "assistant:c", "system:S.", "user:d", "user:e"])
    found = prompts(live, scripted, path, body(path, history))
    wanted = "system:S.|user:a\n\nb|assistant:c|user:d\n\ne|"
    assert scripted.llm.tokenizer.decode(found) == wanted


@pytest.mark.parametrize("path", APIS)
def test_what_no_repair_helps_is_the_templates_own_sentence(live, monkeypatch, scripted, path):
    template = "{{ raise_exception('no ' + messages[-1].role) }}"
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": template})
    found = live.post(path, body(path, conversation(["system:S.", "user:a", "system:T."])))
    assert found.status_code == 400 and "no system" in found.json()["error"]["message"]


NULLS = {"annotations": None, "audio": None, "refusal": None, "function_call": None, "novel": None}


def test_null_is_absence_at_every_level_of_a_chat(live, scripted):
    history = [USER, says("", call("f", {"a": None}, "a")), tool("a", "x"), USER]
    wanted = prompts(live, scripted, CHAT, body(CHAT, history) | {"tools": [TOOL]})
    (one,) = history[1]["tool_calls"]
    deep = {**one, "index": None, "novel": None, "function": {**one["function"], "novel": None}}
    given = [
        {
            **each,
            **NULLS,
            "tool_calls": None,
            "name": None,
            "tool_call_id": each.get("tool_call_id"),
        }
        for each in history
    ]
    given[1] |= {"content": None, "tool_calls": [deep]}
    function = {**TOOL["function"], "strict": None, "novel": None}
    more = {"tools": [{**TOOL, "novel": None, "function": function}], "novel": None}
    assert prompts(live, scripted, CHAT, {"messages": given, **more}) == wanted
    assert scripted.llm.encode_chat(given, tools=[TOOL]) == wanted
    assert '{"a": null}' in scripted.llm.tokenizer.decode(wanted)


def test_null_is_absence_at_every_level_of_responses_and_messages(live, scripted):
    nulls = {"novel": None, "status": None, "id": None, "is_error": None, "citations": None}
    history = [USER, says("Well.", call("f", '{"a": null}', "a")), tool("a", "x"), USER]
    wanted = scripted.llm.encode_chat(history, tools=[TOOL])
    given = [{**each, **nulls} for each in body(RESPONSES, history)["input"]]
    given[1]["content"] = [{"type": "output_text", "text": "Well.", "annotations": None}]
    given.insert(0, {"type": "reasoning", "content": None, "summary": None})
    given.insert(3, {"type": "reasoning", "content": [{"text": None}], "summary": []})
    flat = {"type": None, **FUNCTION, "strict": None}
    found = prompts(live, scripted, RESPONSES, {"input": given, "tools": [flat]})
    assert found == wanted
    given = body(MESSAGES, history)
    for each in given["messages"]:
        each["novel"] = None
        each["content"] = [{**nulls, **block} for block in each["content"]]
    given["messages"][1]["content"][0]["text"] = "Well."
    given["messages"][1]["content"].insert(0, {"type": "thinking", "thinking": None})
    schema = {"name": FUNCTION["name"], "description": FUNCTION["description"], "type": None,
              "input_schema": FUNCTION["parameters"], "cache_control": None}  # fmt: skip
    more = {"tools": [schema], "system": None, "thinking": None, "tool_choice": None}
    found = prompts(live, scripted, MESSAGES, given | more)
    assert found == wanted


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ("{{ m.role + ':' + m.content }}", "assistant:f"),
        (
            "{% if m.content is none %}none{% else %}{{ m.role + ':' + m.content }}{% endif %}",
            "nonef",
        ),
    ],
)
@pytest.mark.parametrize("content", [None, "", ABSENT])
def test_calls_without_content_are_shown_as_the_template_takes_them(
    live, scripted, monkeypatch, path, shown, wanted, content
):
    arguments = "{{ c.function.name + c.function.arguments['i'] }}"
    template = "{% for m in messages %}" + shown + "{% for c in m.tool_calls or [] %}" + arguments
    template += "{% endfor %}|{% endfor %}"
    message = says(content, call("f", {"i": "1"}, "a"))
    history = [USER, message, tool("a", "x")]
    if content is ABSENT:
        del message["content"]
    given = body(path, [USER, says(None, *message["tool_calls"]), history[2]])
    given = {"messages": history} if path == CHAT else given
    for text in (
        template,
        template.replace(arguments, "{{ c.function.name + c.function.arguments }}"),
    ):
        monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": text})
        written = "1" if text == template else '{"i": "1"}'
        found = scripted.llm.tokenizer.decode(prompts(live, scripted, path, given))
        assert found == f"user:Hi|{wanted}{written}|tool:x|"


@pytest.mark.parametrize("path", APIS)
def test_a_result_of_nothing_is_empty(live, scripted, path):
    history = [USER, says("", call("f", {}, "a")), tool("a", None)]
    wanted = scripted.llm.encode_chat([*history[:2], tool("a", "")])
    assert prompts(live, scripted, path, body(path, history)) == wanted


@pytest.mark.parametrize("name", ["annotation", "parsed_", "reasoning_details", "function_calls"])
def test_unknown_fields_that_say_something_are_errors(live, name):
    found = live.post(CHAT, {"messages": [USER, {**says("x"), name: [1]}, USER]})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, f"messages[1].{name}")


@pytest.mark.parametrize(
    "said", ["Hello, world.", CALL, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"]
)
def test_what_openais_client_dumps_is_taken(live, scripted, said):
    scripted.script = scripted.says(said)
    given = {"base_url": f"{live.url}/v1", "api_key": "any", "max_retries": 0}
    with openai.OpenAI(**given) as client:
        asked = [{"role": "user", "content": QUESTION}]
        strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
        how = {"model": live.service.names[0], "tools": [strict]}
        whole = client.chat.completions.create(messages=asked, **how).choices[0].message
        parsed = client.chat.completions.parse(messages=asked, **how).choices[0].message
        with client.chat.completions.stream(messages=asked, **how) as stream:
            final = stream.get_final_completion().choices[0].message
        response = client.responses.create(
            model=how["model"], input=asked, tools=[{"type": "function", **FUNCTION}]
        )
        for message in (whole, parsed, final):
            dumped = message.model_dump()
            results = [tool(each["id"], "12") for each in dumped["tool_calls"] or ()]
            again = [*asked, dumped, *results, USER]
            scripted.asked.clear()
            client.chat.completions.create(messages=again, **how)
            client.chat.completions.create(messages=again, stream=True, **how).close()
            text = scripted.llm.tokenizer.decode(scripted.asked[0][0], skip_special_tokens=False)
            assert said.rpartition("I look.\n")[2] in text
        outputs = [each.model_dump() for each in response.output]
        results = [
            {"type": "function_call_output", "call_id": each["call_id"], "output": "12"}
            for each in outputs if each["type"] == "function_call"
        ]  # fmt: skip
        client.responses.create(model=how["model"], input=[*asked, *outputs, *results, USER])
        text = scripted.llm.tokenizer.decode(scripted.asked[-1][0], skip_special_tokens=False)
        assert said.rpartition("I look.\n")[2] in text


@pytest.mark.parametrize(
    "said", ["Hello, world.", CALL, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"]
)
def test_what_anthropics_client_dumps_is_taken(live, scripted, said):
    scripted.script = scripted.says(said)
    schema = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    given = {"base_url": live.url, "api_key": "any", "max_retries": 0}
    with anthropic.Anthropic(**given) as client:
        how = {"model": live.service.names[0], "max_tokens": 90, "tools": [schema]}
        asked = {"role": "user", "content": QUESTION}
        whole = client.messages.create(messages=[asked], **how)
        with client.messages.stream(messages=[asked], **how) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": None, "is_error": None}
                for each in message.content if each.type == "tool_use"
            ]  # fmt: skip
            late = {"role": "system", "content": "Be brief."}
            again = [asked, message.model_dump(), {"role": "user", "content": results}, late, USER]
            client.messages.create(messages=again, **how)
            text = scripted.llm.tokenizer.decode(scripted.asked[-1][0], skip_special_tokens=False)
            assert said.rpartition("I look.\n")[2] in text and "Be brief." in text


def test_a_chat_of_two_texts_in_one_turn_keeps_both(live, scripted):
    said = [{"role": "assistant", "content": text} for text in ("First.", " \nAnd then.")]
    given = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "x"}
    found = live.post(RESPONSES, {"input": [USER, said[0], given, said[1], result]})
    assert found.status_code == 200
    wanted = [USER, says("First. \nAnd then.", call("f", {}, "a")), tool("a", "x")]
    assert scripted.asked[-1][0] == scripted.llm.encode_chat(wanted)


def test_arguments_of_custom_tools_are_their_text(live, scripted):
    given = [
        USER, {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
    ]  # fmt: skip
    assert live.post(RESPONSES, {"input": given}).status_code == 200
    text = scripted.llm.tokenizer.decode(scripted.asked[-1][0], skip_special_tokens=False)
    assert json.dumps({"input": "*** Begin"}) in text


def test_python_takes_stored_histories_too(llm: LLM):
    odd = [USER, says(None, call("f", "", "a"), call("f", '{"b": 1}', "b")), tool("b", "2"),
           tool("a", None), {"role": "developer", "content": "Be brief."}]  # fmt: skip
    plain = [USER, says("", call("f", {}, "a"), call("f", {"b": 1}, "b")), tool("a", ""),
             tool("b", "2"), {"role": "system", "content": "Be brief."}]  # fmt: skip
    assert llm.encode_chat(odd) == llm.encode_chat(plain)
    for wrong in ([], None, "Hi", [5]):
        with pytest.raises(RequestError):
            llm.encode_chat(wrong)


def test_calls_as_functions_are_calls_of_tools(live, scripted):
    """OpenAI's fields before tools: function_call, and results of the role function."""
    arguments = '{"city": "Oslo"}'
    asked = {"role": "user", "content": QUESTION}
    older = [
        asked,
        {"role": "assistant", "content": None,
         "function_call": {"name": "get_weather", "arguments": arguments}},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]  # fmt: skip
    newer = [
        asked,
        says(None, call("get_weather", arguments, "call_1")),
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"},
    ]
    found, wanted = (prompts(live, scripted, CHAT, {"messages": m}) for m in (older, newer))
    assert found == wanted
    alone = [asked, {"role": "function", "name": "f", "content": "7"}]
    assert prompts(live, scripted, CHAT, {"messages": alone})
