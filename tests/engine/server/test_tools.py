"""Tools and reasoning through the routes, streamed and whole, by a scripted engine; and forced
calls, which are valid whatever the model is."""

from __future__ import annotations

import json
import time

import pytest

from rooflax import LLM, AsyncLLM, SamplingParams, structured
from rooflax.cli.serve import _warn_of_template
from rooflax.nn.host_memory import anonymous_bytes
from rooflax.server.call_formats import formats
from rooflax.server.tools import tool_choice
from tests.support.server.live import serving

pytestmark = pytest.mark.oldest_jax

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name="look", **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def written(*names, arguments='{"city": "Oslo", "days": 1}'):
    calls = [
        f'<tool_call>\n{{"name": "{n}", "arguments": {arguments}}}\n</tool_call>' for n in names
    ]
    return "\n".join(calls)


def whole(live, **fields):
    found = live.post(CHAT, {"messages": MESSAGES} | fields)
    assert found.status_code == 200, found.text
    return found.json()


def streamed(live, **fields):
    """The choices of a stream, put together as a client does."""
    text = live.post(CHAT, {"messages": MESSAGES, "stream": True} | fields).text
    choices: dict[int, dict] = {}
    for line in text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found = choices.setdefault(
                choice["index"], {"content": "", "reasoning_content": "", "tool_calls": {}}
            )
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                found[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                one = found["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                one["name"] += call["function"].get("name", "")
                one["arguments"] += call["function"]["arguments"]
                assert ("id" in call) == ("name" in call["function"])
            found["finish_reason"] = choice["finish_reason"]
    return choices


TEXTS = [
    written("look"),
    "I shall look.\n" + written("look", "look"),
    "<think>\nWhich city?\n</think>\n\n" + written("look"),
    "<think>\nWhich city?\n</think>\n\nWhich one?",
    "<tool_call>\nno JSON\n</tool_call>",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("logprobs", [False, True])
def test_streamed_and_whole_say_the_same(live, scripted, text, num_samples, logprobs):
    scripted.script = scripted.says(text)
    fields = {"tools": [tool()], "n": num_samples, "logprobs": logprobs}
    choices = whole(live, **fields)["choices"]
    stream = streamed(live, **fields)
    assert sorted(stream) == list(range(num_samples))
    for choice in choices:
        message, other = choice["message"], stream[choice["index"]]
        assert (message["content"] or "") == other["content"]
        assert message.get("reasoning_content", "") == other["reasoning_content"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert calls == list(other["tool_calls"].values())
        assert choice["finish_reason"] == other["finish_reason"]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        if logprobs:
            spelled = "".join(one["token"] for one in choice["logprobs"]["content"])
            assert spelled.startswith(text)


def test_ids_of_calls_are_new_each_time(live, scripted):
    scripted.script = scripted.says(written("look", "look"))
    calls = whole(live, tools=[tool()])["choices"][0]["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and len(call["id"]) == 29 for call in calls)


def test_a_stop_string_within_arguments_stops_nothing(live, scripted):
    scripted.script = scripted.says(written("look") + "\nThat was Oslo, I think.")
    choice = whole(live, tools=[tool()], stop=["Oslo"])["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "Oslo"')
    assert (choice["message"]["content"], choice["stop_reason"]) == ("That was ", "Oslo")


def test_g7_a_call_that_is_cut_keeps_what_was_written(live, scripted):
    scripted.script = scripted.says(written("look"))
    size = len(scripted.llm.tokenizer.encode(written("look").partition("Oslo")[0]))
    choice = whole(live, tools=[tool()], max_tokens=size)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')


def test_g7_calls_that_do_not_parse_are_counted(live, scripted):
    before = live.service.failed_calls
    scripted.script = scripted.says("<tool_call>x</tool_call>")
    assert whole(live, tools=[tool()])["choices"][0]["message"]["content"].startswith("<tool_call>")
    assert live.service.failed_calls == before + 1


CODE = "__import__('os').system('touch {}')"
RAW = [
    '<tool_call>{"name": "look", "argu', '<tool_call>{"name": "look", "x": 1}</tool_call>',
    '<tool_call>{"name": "look", "arguments": "no"}</tool_call>', "<tool_call></tool_call>",
    '<tool_call>{"name": "a b", "arguments": 5}</tool_call> or not', "</tool_call>", "<tool_call",
    "<tool_call>look(city='Oslo')</tool_call>", "<tool_call>" + CODE + "</tool_call>",
    '<tool_call>{"name": "look", "arguments": [}</tool_call>', "<tool_call>" + "[" * 300,
]  # fmt: skip


@pytest.mark.parametrize("text", RAW, ids=lambda text: text[:50])
def test_g7_what_is_no_call_is_content(live, scripted, text, tmp_path):
    text = text.replace("{}'", f"{tmp_path / 'made'}'")
    scripted.script = scripted.says(text)
    choice = whole(live, tools=[tool()])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    stream = streamed(live, tools=[tool()])[0]
    assert (stream["content"], stream["tool_calls"]) == (text, {})
    assert not list(tmp_path.iterdir())


QUOTES = ['a " \\ "} </tool_call', '"' * 3 + "\n# x", "${x} $(id) `id`", "\x00\x1b[2J", CODE]


@pytest.mark.parametrize("value", QUOTES)
def test_g7_code_and_quotes_in_arguments_stay_text(live, scripted, value, tmp_path):
    value = value.replace("{}'", f"{tmp_path / 'made'}'")
    arguments = json.dumps({"city": value, "deep": [{"code": value}]})
    scripted.script = scripted.says(written("look", arguments=arguments))
    (call,) = whole(live, tools=[tool()])["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
    assert streamed(live, tools=[tool()])[0]["tool_calls"][0] == call["function"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [tool(), tool()]}, "tools", "invalid_value"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("x\n")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool(str(i)) for i in range(129)]}, "tools", "invalid_value"),
        ({"tools": [tool(description="x" * 70_000)]}, "tools", "invalid_schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "no"}}},
         "tool_choice", "invalid_value"),
        ({"tools": [tool()], "structured_outputs": {"choice": ["a"]}}, "structured_outputs",
         "unsupported_value"),
        *(
            ({"tools": [tool(parameters=schema)], "tool_choice": "required"},
             "tools[0].function.parameters", "invalid_schema")
            for schema in ({"type": "integer"}, {"type": ["string", "null"]}, {"const": 1},
                           {"enum": ["x"]})
        ),
        ({"functions": []}, "functions", "unsupported_value"),
    ],
)  # fmt: skip
def test_g6_tools_that_cannot_be(live, fields, param, code):
    found = live.post(CHAT, {"messages": MESSAGES} | fields)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, param, code)


def test_templates_that_read_variables_get_them(live, monkeypatch, llm):
    template = (
        "{% if not enable_thinking is defined or enable_thinking %}<think>{% endif %}"
        "{{ mood }}{{ messages[0].content }}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})

    def prompt(**fields):
        return live.post("/apply-template", {"messages": MESSAGES} | fields).json()["prompt"]

    assert prompt().startswith("<think>What")
    assert prompt(reasoning_effort="none").startswith("What")
    assert prompt(chat_template_kwargs={"mood": "glad "}).startswith("<think>glad What")
    for name in ("tokenize", "template", "messages", "tools", "bos_token"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}}
        assert live.post("/apply-template", body).status_code == 400
    template = "{{ reasoning_effort }} {{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})
    assert prompt(reasoning_effort="high").startswith("high What")
    found = live.post(CHAT, {"messages": MESSAGES, "reasoning_effort": "none"})
    assert found.json()["error"]["param"] == "reasoning_effort"


BOMB = "{% for i in range(10**9) %}x{% endfor %}"


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/apply-template"])
def test_g8_requests_bring_no_template(live, path):
    for fields, param in (
        ({"chat_template": BOMB}, "chat_template"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        *(
            ({"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}")
            for name, value in (
                ("tokenize", True), ("chat_template", BOMB), ("template", BOMB), ("messages", []),
                ("tools", []), ("add_generation_prompt", False), ("eos_token", "x"), ("novel", 1),
                ("special_tokens", {}), ("documents", []), ("raise_exception", 1),
            )
        ),
    ):  # fmt: skip
        found = live.post(path, {"messages": MESSAGES} | fields)
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)
        assert len(found.json()["error"]["message"]) < 200


HOSTILE = {
    "loops": "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "writes": BOMB,
    "multiplies": "{{ 'a' * 10**10 }}",
    "is nested": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "raises": "{{ raise_exception('not like this') }}",
    "is no template": "{% if %}",
    "fails": "{{ messages[7].content.x }}",
    "reads files": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_g9_a_hostile_template_fails_the_chat_alone(live, llm, monkeypatch, capfd, template):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})
    for stream in (False, True):
        started = time.process_time()
        found = live.post(CHAT, {"messages": MESSAGES, "stream": stream})
        assert time.process_time() - started < 2
        error = found.json()["error"]
        assert found.status_code == 400 and "the chat template" in error["message"]
        assert "root:" not in error["message"] and len(error["message"]) < 200
    assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
    _warn_of_template(llm)
    warned = capfd.readouterr().err
    assert warned.startswith("rooflax: chats will be rejected: ") and warned.count("\n") == 1


def test_g9_a_template_that_is_missing_is_said(live, llm, monkeypatch, capfd):
    _warn_of_template(llm)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {})
    _warn_of_template(llm)
    assert "no chat template" in capfd.readouterr().err
    found = live.post(CHAT, {"messages": MESSAGES})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "messages")


def test_a_schema_begins_after_the_reasoning_that_the_prompt_opened(live, scripted, monkeypatch):
    template = "{{ messages[0].content }}<think>{# </think> #}"
    llm = scripted.llm
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    scripted.script = scripted.says('Hm.</think>\n{"a": 1}')
    message = whole(live, response_format=form)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
    params = scripted.asked[-1][1]
    assert lets_through(llm, params, 'Hm.</think>\n{"a":1}')
    assert not lets_through(llm, params, 'Hm.</think>\n{"b":1}')
    whole(live, structured_outputs={"regex": "a/b+"})
    assert lets_through(llm, scripted.asked[-1][1], "Hm.</think>a/bb")
    body = {"messages": MESSAGES, "structured_outputs": {"choice": ["a"]}}
    assert live.post(CHAT, body).json()["error"]["param"] == "structured_outputs"


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        {"type": "string", "pattern": "["},
        {"$ref": "http://127.0.0.1:1/x.json"},
        {"$ref": "#/nowhere"},
        {"type": "nothing"},
        {"type": "integer", "minimum": 5, "maximum": 1},
        nested(20),
    ],
    ids=str,
)
def test_g3_schemas_that_cannot_be(live, schema):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = live.post(CHAT, {"messages": MESSAGES, "response_format": form})
    if found.status_code != 200:
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, "response_format")
        assert error["code"] == "invalid_schema"
    assert found.status_code == (200 if schema == nested(20) else 400)


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"regex": "(a+)+b"}, True), ({"regex": "["}, False), ({"regex": "(?<=a)b"}, False),
        ({"regex": "x" * 100_000}, False), ({"regex": "a\\"}, False), ({"regex": "a\\\\"}, True),
        ({"grammar": 'start: start "a"'}, False),
        ({"grammar": "("}, False), ({"grammar": "start: nowhere"}, False), ({"grammar": ""}, False),
    ],
    ids=lambda form: str(form)[:40],
)  # fmt: skip
def test_g1_g2_regexes_and_grammars(live, form, fits):
    found = live.post("/v1/completions", {"prompt": "x", "structured_outputs": form})
    assert found.status_code == (200 if fits else 400), found.text
    if not fits:
        assert found.json()["error"]["param"] == "structured_outputs"


def test_g3_a_schema_may_have_a_thousand_properties_that_need_not_be_there(llm):
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1000)}}
    assert lets_through(llm, SamplingParams(json_schema=schema), '{"k500":1,"k501":2}')


CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_g3_parameters_that_refer_to_themselves_alone(live, path, fields):
    fields |= {"tools": [tool(parameters=CYCLE, strict=True)], "messages": MESSAGES}
    if path != CHAT:
        given = [{"type": "function", **each["function"]} for each in fields["tools"]]
        fields = {"input": "x", **fields, "tools": given}
        del fields["messages"]
    found = live.post(path, fields)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, "tools", "invalid_schema")


SLASHES = [
    ("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b"), (r"a\\\/b", r"a\/b"), ("//[/]", "///"),
]  # fmt: skip


@pytest.mark.parametrize(("regex", "text"), SLASHES)
@pytest.mark.parametrize("tools", [{}, {"tools": [tool(strict=True)]}])
def test_slashes_of_a_regex_may_be_escaped(live, scripted, regex, text, tools):
    whole(live, structured_outputs={"regex": regex}, **tools)
    params = scripted.asked[-1][1]
    assert lets_through(scripted.llm, params, text)
    assert not lets_through(scripted.llm, params, "b")


def test_a_backslash_at_the_end_of_a_regex_escapes_nothing(live):
    fields = {"tools": [tool()], "structured_outputs": {"regex": "a\\"}}
    error = live.post(CHAT, {"messages": MESSAGES} | fields).json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs", "invalid_schema")
    assert "backslash" in error["message"]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_g4_of_many_schemas_the_last_are_kept(live, llm, monkeypatch, count):
    """Each is compiled, but for the trial in a process of its own."""
    monkeypatch.setattr(structured, "_try_apart", lambda *_: [""])
    memory = []
    for number in range(count):
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        fields = {"messages": MESSAGES, "response_format": form, "max_tokens": 1}
        assert live.post(CHAT, fields).status_code == 200
        memory.append(anonymous_bytes() or 0)
    grammars = llm.processor.grammars
    assert len(grammars._compiled) == structured.KEPT and not grammars._awaited
    assert memory[-1] - memory[count // 2] < 32 * 2**20


def test_channels_take_no_beginning(live, scripted, monkeypatch):
    template = "{{ messages[0].content }}<|start|>assistant{# <|channel|> <|message|> #}"
    monkeypatch.setattr(scripted.llm.tokenizer, "chat_templates", {"default": template})
    begun = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "messages": begun}
    found = live.post(CHAT, fields)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "unsupported_value")
    call = {"tools": [tool()], "tool_choice": "required"}
    for fields in ({"response_format": {"type": "json_object"}}, call):
        assert live.post(CHAT, {"messages": MESSAGES} | fields).status_code == 200
        grammar = scripted.asked[-1][1].grammar
        assert "final" in grammar if fields is not call else "to=functions.look" in grammar


def test_reasoning_fields_are_named_as_was_chosen(llm):
    from tests.support.server.live import ScriptedLLM

    scripted = ScriptedLLM(llm)
    scripted.script = scripted.says("<think>Hm.</think>Yes.")
    with serving(lambda _: scripted, reasoning_field="both") as server:
        message = whole(server)["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "Hm."


HERMES = next(each for each in formats() if each.name == "hermes")


@pytest.fixture(scope="module")
def weights():
    """A model of random weights, which says anything."""
    return LLM("preset:qwen2.5-tiny", max_model_len=256)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "b"}])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_valid_on_random_weights(weights, choice, parallel, seed):
    from rooflax.server.reader import Reader

    found = tool_choice(
        {"tools": [tool("a"), tool("b")], "tool_choice": choice, "parallel_tool_calls": parallel},
        HERMES,
    )
    grammar = found.grammar({}, "not")
    (answer,) = weights.generate([[1, 2, 3]], grammar=grammar, max_tokens=150, seed=seed)
    reader = Reader(weights.tokenizer, HERMES, reads_calls=True)
    content = "".join(map(reader.push, answer.tokens)) + reader.flush(is_cut=False)
    reading = reader.take(len(content))
    events = reading.events
    names = [each.text for each in events if each.kind == "call"]
    assert content.strip() == "" and names
    assert set(names) <= ({"b"} if isinstance(choice, dict) else {"a", "b"})
    assert parallel or len(names) == 1
    texts, at = [], -1
    for each in events:
        if each.kind == "call":
            texts.append("")
            at += 1
        elif each.kind == "arguments":
            texts[at] += each.text
    for text in texts[: reading.num_calls]:
        arguments = json.loads(text)
        assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2)
    assert reading.num_calls >= len(names) - (answer.finish_reason == "length")


def test_strict_tools_leave_text_free_and_calls_valid():
    from rooflax.models.presets import CHAT_NAME

    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=2)) as server:
        strict = tool("get_weather", strict=True, description="Weather of a city")
        choice = whole(server, tools=[strict], max_tokens=100)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
        question = [{"role": "user", "content": "Who are you?"}]
        choice = whole(server, tools=[strict], messages=question, max_tokens=100)["choices"][0]
        assert "rooflax-chat" in choice["message"]["content"]
        one = whole(
            server, tools=[tool("get_weather", description="Weather of a city")],
            parallel_tool_calls=False, max_tokens=100,
        )  # fmt: skip
        assert len(one["choices"][0]["message"]["tool_calls"]) == 1


JSON_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("more", [{}, {"strict": True}])
def test_tools_may_be_called_beside_a_response_format(live, scripted, more):
    fields = {"tools": [tool(**more)], "response_format": JSON_FORM}
    whole(live, **fields)
    params = scripted.asked[-1][1]
    for text in (written("look"), written("look", "look"), '{"city":"Oslo","days":1}'):
        assert lets_through(scripted.llm, params, text)
    assert not lets_through(scripted.llm, params, "No.")
    whole(live, **fields, tool_choice="required")
    params = scripted.asked[-1][1]
    assert lets_through(scripted.llm, params, written("look"))
    assert not lets_through(scripted.llm, params, '{"city":"Oslo","days":1}')
    whole(live, **fields, tool_choice="none")
    assert scripted.asked[-1][1].json_schema


@pytest.mark.parametrize(
    "schema",
    [{"not": {"type": "string"}}, {"type": "string", "pattern": "(?=x)a"},
     {"type": "array", "uniqueItems": True}],
)  # fmt: skip
def test_one_call_of_ordinary_tools_needs_no_schema_that_can_be_forced(schema):
    given = tool(parameters={"type": "object", "properties": {"a": schema}})
    with serving(lambda _: AsyncLLM("rooflax-chat-5m", max_num_seqs=2)) as server:
        whole(server, tools=[given], parallel_tool_calls=False, max_tokens=5)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("if a < b: <tool>", True),
        ("Well.\n" + written("look"), True),
        ("Well.\n" + written("look", "look"), True),
        ("<tool_call>x", False),
        (written("see"), False),
        (written("look", arguments='{"city": 5}'), False),
    ],
)
def test_what_the_grammar_of_strict_tools_lets_through(llm, text, fits):
    choice = tool_choice({"tools": [tool(strict=True)]}, HERMES)
    params = SamplingParams(grammar=choice.grammar({}, "not"))
    assert lets_through(llm, params, text) == fits


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {"type": "integer"}}}, {"anyOf": [{"type": "integer"}, {}]},
     {"enum": ["x", {"a": 1}]}, {"$ref": "#/$defs/b", "$defs": {"b": {}}}],
)  # fmt: skip
def test_forced_arguments_are_an_object_whatever_the_schema_says(llm, schema):
    tools = [tool(parameters=schema)]
    for form in (None, {"json_schema": SCHEMA}):
        choice = tool_choice({"tools": tools, "tool_choice": "required"}, HERMES)
        params = SamplingParams(grammar=choice.grammar({}, "not", form))
        assert lets_through(llm, params, written("look", arguments='{"a": 1}'))
        for wrong in ("3", '"x"', "null"):
            assert not lets_through(llm, params, written("look", arguments=wrong))


@pytest.mark.parametrize(
    ("text", "fits"),
    [("Hm.</think>\n" + written("look"), True), ("Hm.</think>\nNo.", False), ("a<b", True)],
)
def test_forced_calls_come_after_the_reasoning(llm, text, fits):
    choice = tool_choice({"tools": [tool()], "tool_choice": "required"}, HERMES)
    params = SamplingParams(grammar=choice.grammar({}, "opened"))
    assert lets_through(llm, params, text) == fits


def lets_through(llm, params, text):
    constraint = llm.processor.grammars.constraint(params, llm.stop_ids)
    for token in llm.tokenizer.encode(text):
        if not constraint.mask[token // 32] >> (token % 32) & 1:
            return False
        constraint.accept(token)
    return True
