"""Tools of models whose templates show none: stated as text, called in a generic format, forced by
the same grammars."""

from __future__ import annotations

import copy
import json

import pytest

from rooflax.errors import RequestError
from rooflax.loading.generic_tools import encode_as_text
from rooflax.server.call_formats import GENERIC, format_of, with_calls
from tests.engine.server.test_tools import CHAT, MESSAGES, streamed, tool, whole, written

pytestmark = pytest.mark.oldest_jax

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
HIDES = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OWN_NAMES = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
OWN = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
TOOLS = [tool()]
WANTS_CALL = {"tools": TOOLS, "tool_choice": "required"}


def call(id_, city):
    return {"id": id_, "type": "function",
            "function": {"name": "look", "arguments": {"city": city}}}  # fmt: skip


HISTORY = [
    {"role": "user", "content": "Oslo and Rome?"},
    {"role": "assistant", "content": "Both.", "tool_calls": [call("a", "Oslo"), call("b", "Rome")]},
    {"role": "tool", "tool_call_id": "a", "content": "cold"},
    {"role": "tool", "tool_call_id": "b", "content": "warm"},
    {"role": "assistant", "content": "Cold; warm."},
]


@pytest.fixture
def prompt_of(llm, monkeypatch):
    """What a template is given to a conversation with tools."""

    def prompt(template, messages, tools=TOOLS, **variables):
        monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})
        ids = encode_as_text(llm.tokenizer, messages, tools=list(tools), **variables)
        return llm.tokenizer.decode(ids, skip_special_tokens=False)

    return prompt


def test_tools_stand_in_the_first_system_message(prompt_of):
    for messages, begun in (
        (HISTORY, "<|im_start|>system\n# Tools\n"),
        ([{"role": "system", "content": "Be brief."}, *HISTORY],
         "<|im_start|>system\nBe brief.\n\n# Tools\n"),
    ):  # fmt: skip
        said = prompt_of(CHATML, messages)
        assert said.startswith(begun)
        assert f"<tools>\n{json.dumps(tool())}\n</tools>" in said
        assert said.count("# Tools") == said.count("<|im_start|>system") == 1
        assert said.endswith("<|im_start|>assistant\n")


def test_calls_and_results_of_the_past_are_text(prompt_of):
    oslo, rome = (json.dumps({"name": "look", "arguments": {"city": c}}) for c in ("Oslo", "Rome"))
    said = prompt_of(CHATML, HISTORY, tools=())
    assert said == (
        "<|im_start|>user\nOslo and Rome?<|im_end|>\n"
        f"<|im_start|>assistant\nBoth.\n<tool_call>\n{oslo}\n</tool_call>\n"
        f"<tool_call>\n{rome}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ncold\n</tool_response>\n"
        "<tool_response>\nwarm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nCold; warm.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [ALTERNATES, HIDES])
def test_where_a_system_message_is_rejected_or_hidden_the_user_says_it(prompt_of, template):
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        if system and template == ALTERNATES:
            with pytest.raises(RequestError):
                prompt_of(template, [*system, *HISTORY])
            continue
        said = prompt_of(template, [*system, *HISTORY])
        assert said.startswith("user: # Tools\n") and "</tool_call>\n\nOslo and Rome?\n" in said
        assert said.count("# Tools") == 1


def test_in_python_tools_are_shown_too(llm):
    """Where the template shows none; its own way of showing them stays."""
    for template, is_text in ((CHATML, True), (HIDES, True), (OWN, False)):
        for messages, tools in ((HISTORY, [tool()]), (MESSAGES, [tool()]), (HISTORY, None)):
            ids = llm.encode_chat(messages, tools=tools, chat_template=template)
            said = llm.tokenizer.decode(ids)
            assert ("Oslo" in said) and (tools is None or "look" in said)
            assert ("# Tools" in said) == (is_text and tools is not None)
            assert ("<tool_call>" in said) == is_text
    parts = [{"type": "text", "text": "Be brief."}]
    odd = [
        {"role": "system", "content": parts},
        {"role": "user"},
        {"role": "tool", "content": parts},
        {"role": "assistant", "content": parts, "tool_calls": ["look"]},
    ]
    said = llm.tokenizer.decode(llm.encode_chat(odd, tools=[tool()], chat_template=OWN_NAMES))
    assert said.count("Be brief.") == 3 and said.count("# Tools") == 1
    with pytest.raises(RequestError, match="at least one message"):
        llm.encode_chat([], tools=[tool()], chat_template=CHATML)
    with pytest.raises(RequestError):
        llm.encode_chat(["text"], tools=[tool()], chat_template=CHATML)


def test_formats_that_are_known_stay():
    for template, name in ((CHATML, GENERIC), ("<think></think>", GENERIC), (None, GENERIC)):
        format = with_calls(format_of(template))
        assert format.name == name and format.calls is not None
        assert (format.reasoning is not None) == (template == "<think></think>")
    hermes = format_of("<tool_call></tool_call>")
    assert with_calls(hermes) is hermes


@pytest.fixture(params=[CHATML, HIDES, OWN], ids=["chatml", "hides", "own"])
def without_tools(llm, monkeypatch, request):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": request.param})
    return request.param


def test_calls_in_the_generic_format_are_read(live, scripted, without_tools):
    scripted.script = scripted.says("I shall look.\n" + written("look"))
    for wanted in ("auto", "required", {"type": "function", "function": {"name": "look"}}):
        fields = {"tools": [tool()], "tool_choice": wanted}
        choice = whole(live, **fields)["choices"][0]
        (made,) = choice["message"]["tool_calls"]
        assert made["function"]["name"] == "look" and choice["finish_reason"] == "tool_calls"
        assert streamed(live, **fields)[0]["tool_calls"][0] == made["function"]
        grammar = scripted.asked[-1][1].grammar
        assert (grammar is not None) == (wanted != "auto")


def test_every_api_makes_calls_without_a_format(live, scripted, without_tools):
    scripted.script = scripted.says(written("look"))
    function = tool()["function"]
    ours = {"name": "look", "input_schema": function["parameters"]}
    found = live.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 60, "tools": [ours]})
    assert found.json()["stop_reason"] == "tool_use", found.text
    theirs = {"type": "function", **function}
    found = live.post("/v1/responses", {"input": "Oslo?", "tools": [theirs]})
    assert found.json()["output"][-1]["type"] == "function_call", found.text
    assert live.http.get("/props").json()["chat_template_caps"]["tools"] is True


def test_stored_calls_without_tools_are_not_lost(live, without_tools):
    stored = copy.deepcopy(HISTORY)
    for each in stored[1]["tool_calls"]:
        each["function"]["arguments"] = json.dumps({"city": each["id"] * 9})
    said = live.post("/apply-template", {"messages": stored}).json()["prompt"]
    assert "aaaaaaaaa" in said and "bbbbbbbbb" in said
    assert ("<tool_call>" in said) == (without_tools != OWN)


def test_without_a_template_that_is_what_is_said(live, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {})
    found = live.post(CHAT, {"messages": MESSAGES, **WANTS_CALL})
    assert found.status_code == 400 and "--chat-template" in found.json()["error"]["message"]


def test_it_is_logged_once(live, without_tools, caplog):
    live.service._has_said_generic = False
    for _ in range(2):
        whole(live, tools=[tool()])
    said = [each for each in caplog.messages if "shows no tools" in each]
    assert len(said) == 1
