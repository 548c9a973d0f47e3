"""Answers that the model or max_tokens leaves open: calls that are cut or do not parse, calls
without arguments, reasoning that nothing closes. Three APIs, streamed and whole."""

from __future__ import annotations

import json
from typing import NamedTuple

import anthropic
import openai
import pytest

from tests.engine.server.test_apis import events_of

pytestmark = pytest.mark.oldest_jax

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "look"}}],
    RESPONSES: [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    MESSAGES: [{"name": "look", "input_schema": {"type": "object"}}],
}
MOST = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
ENDS = {
    CHAT: {"stop": "stop", "length": "length", "tool_calls": "tool_calls"},
    RESPONSES: {"stop": "completed", "length": "incomplete", "tool_calls": "completed"},
    MESSAGES: {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
}
NAMED = "{# [TOOL_CALLS] [ARGS] #}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
BARE = '{# "parameters" ipython #}{% for m in messages %}{{ m.role + m.content }}{% endfor %}'
OPENED = "{# <tool_call> </tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
ARGUMENTS = '{"city": "Os}lo", "days": [1, 2], "deep": {"a": null}}'


class Answer(NamedTuple):
    """What an API says; a call is its name, its arguments and whether it is said to be complete."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, bool]]
    end: str


def ask(live, path, stream, **more):
    given = (
        {"messages": [{"role": "user", "content": "x"}]} if path != RESPONSES else {"input": "x"}
    )
    given |= {"tools": TOOLS[path], MOST[path]: 200} | more
    found = live.post(path, {**given, "stream": stream})
    assert found.status_code == 200, found.text
    return READERS[path](events_of(found) if stream else found.json())


def of_chat(found):
    if isinstance(found, dict):
        (choice,) = found["choices"]
        message = choice["message"]
        calls = [each["function"] for each in message.get("tool_calls", ())]
        end = choice["finish_reason"]
    else:
        message, calls, end = {"content": "", "reasoning_content": ""}, [], None
        for choice in (choice for each in found for choice in each["choices"]):
            delta = choice["delta"]
            for name in message:
                message[name] += delta.get(name) or ""
            for one in delta.get("tool_calls", ()):
                if "name" in one["function"]:
                    calls.append({"name": one["function"]["name"], "arguments": ""})
                calls[one["index"]]["arguments"] += one["function"]["arguments"]
            end = choice["finish_reason"] or end
    calls = [(each["name"], each["arguments"], end == "tool_calls") for each in calls]
    return Answer(message["content"] or "", message.get("reasoning_content") or "", calls, end)


def of_responses(found):
    if isinstance(found, list):
        done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
        last = found[-1]
        assert last["type"] == f"response.{last['response']['status']}"
        found = last["response"]
        assert found["output"] == done
    assert (found["incomplete_details"] is None) or found["status"] == "incomplete"
    parts = {"message": "", "reasoning": ""}
    for each in found["output"]:
        if each["type"] in parts:
            parts[each["type"]] += each["content"][0]["text"]
    calls = [
        (each["name"], each["arguments"], each["status"] == "completed")
        for each in found["output"] if each["type"] == "function_call"
    ]  # fmt: skip
    return Answer(parts["message"], parts["reasoning"], calls, found["status"])


def of_messages(found):
    if isinstance(found, dict):
        blocks, end = found["content"], found["stop_reason"]
    else:
        blocks, end = [], None
        for each in found:
            if each["type"] == "content_block_start":
                blocks.append(each["content_block"] | {"json": ""})
            elif each["type"] == "content_block_delta":
                delta = each["delta"]
                for name, of in (
                    ("text", "text"),
                    ("thinking", "thinking"),
                    ("json", "partial_json"),
                ):
                    if of in delta:
                        blocks[each["index"]][name] += delta[of]
            elif each["type"] == "message_delta":
                end = each["delta"]["stop_reason"]
        for each in blocks:
            if each["type"] == "tool_use":
                each["input"] = json.loads(each["json"])
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    thought = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
    calls = [
        (each["name"], json.dumps(each["input"]), end == "tool_use")
        for each in blocks if each["type"] == "tool_use"
    ]  # fmt: skip
    return Answer(text, thought, calls, end)


READERS = {CHAT: of_chat, RESPONSES: of_responses, MESSAGES: of_messages}


def hermes(arguments):
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


WAYS = {
    "hermes": (None, hermes),
    "mistral": (NAMED, "[TOOL_CALLS]look[ARGS]{}".replace("{}", "%s").__mod__),
    "llama3_json": (BARE, lambda arguments: f'{{"name": "look", "parameters": {arguments}}}'),
}


@pytest.fixture
def way(request, llm, monkeypatch):
    template, written = WAYS[request.param]
    if template is not None:
        monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": template})
    return written


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_call_that_is_cut_is_never_complete(live, scripted, path, way):
    text = way(ARGUMENTS)
    scripted.script = scripted.says(text)
    ids = scripted.llm.tokenizer.encode(text)
    for size in range(1, len(ids)):
        whole = ask(live, path, False, **{MOST[path]: size})
        assert whole == ask(live, path, True, **{MOST[path]: size})
        assert whole.end == ENDS[path]["length"]
        for name, arguments, is_complete in whole.calls:
            assert name == "look"
            if path == MESSAGES:
                assert json.loads(arguments) == json.loads(ARGUMENTS) and not is_complete
            else:
                assert ARGUMENTS.startswith(arguments)
                assert is_complete == (path == RESPONSES and arguments == ARGUMENTS)
        if path == MESSAGES and not whole.calls:  # as the model wrote it
            assert text.startswith(whole.text) and whole.text


BROKEN = [
    '{"x": 1,}', "{'x': 1}", '{"x": nope}', '{"x": "a\nb"}', '{"x": 1 "y": 2}', '{"x": [1}',
    '{"x": [1', '{"x": "\\q"}', '{x: 1}', '{"x":}',
]  # fmt: skip


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("arguments", BROKEN)
def test_a_call_that_does_not_parse_is_never_one_without_arguments(
    live, scripted, path, way, arguments
):
    text = way(arguments)
    scripted.script = scripted.says(text)
    before = live.service.failed_calls
    whole = ask(live, path, False)
    assert whole == ask(live, path, True)
    assert live.service.failed_calls == before + 2
    assert whole.end == (ENDS[path]["stop"] if path != RESPONSES else "incomplete")
    if path == MESSAGES:
        assert whole.calls == [] and whole.text == text
        return
    ((name, written, is_complete),) = whole.calls
    assert (name, is_complete) == ("look", False)
    assert written.startswith(arguments) or arguments.startswith(written)
    assert not is_object(written)


@pytest.mark.parametrize("path", APIS)
def test_of_two_calls_the_one_that_parses_is_made(live, scripted, path):
    scripted.script = scripted.says(f"So.\n{hermes(ARGUMENTS)}\n{hermes(BROKEN[0])}")
    whole = ask(live, path, False)
    assert whole == ask(live, path, True)
    assert whole.end == (ENDS[path]["tool_calls"] if path != RESPONSES else "incomplete")
    good, *broken = whole.calls
    assert json.loads(good[1]) == json.loads(ARGUMENTS) and good[2]
    if path == MESSAGES:
        assert not broken and whole.text.endswith(hermes(BROKEN[0]))
    else:
        assert [each[1] for each in broken] == [BROKEN[0]]


NOTHING = [
    '<tool_call>{"name": "look"}</tool_call>', hermes("null"), hermes('""'), hermes("{}"),
    '<tool_call>{"name": "look"}',
]  # fmt: skip


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("text", NOTHING)
def test_a_call_without_arguments_has_an_empty_object(live, scripted, path, text):
    scripted.script = scripted.says(text)
    whole = ask(live, path, False)
    assert whole == ask(live, path, True)
    assert whole == Answer("", "", [("look", "{}", True)], ENDS[path]["tool_calls"])


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("text", ["It is 5.", "So:\n\n- a < b\n- </thing", "日本 😀"])
def test_reasoning_that_nothing_closes_is_the_answer(live, scripted, llm, monkeypatch, path, text):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": OPENED})
    scripted.script = scripted.says(text)
    whole = ask(live, path, False)
    assert whole == ask(live, path, True)
    assert whole == Answer(text, text, [], ENDS[path]["stop"])
    scripted.script = scripted.says(f"Hm.\n</think>\n\n{text}")
    assert ask(live, path, True) == Answer(text, "Hm.", [], ENDS[path]["stop"])


@pytest.mark.parametrize("path", APIS)
def test_reasoning_that_is_cut_is_no_answer(live, scripted, llm, monkeypatch, path):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": OPENED})
    scripted.script = scripted.says("It is five, I think, or more.")
    whole = ask(live, path, False, **{MOST[path]: 3})
    assert whole == ask(live, path, True, **{MOST[path]: 3})
    assert whole.text == "" and whole.reasoning and whole.end == ENDS[path]["length"]


@pytest.mark.parametrize("path", APIS)
def test_calls_in_reasoning_that_nothing_closes_are_made(live, scripted, llm, monkeypatch, path):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": OPENED})
    scripted.script = scripted.says(f"I look.\n{hermes(ARGUMENTS)}")
    whole = ask(live, path, False)
    assert whole == ask(live, path, True)
    ((name, arguments, is_complete),) = whole.calls
    assert (whole.text, name, is_complete) == ("I look.", "look", True)
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    assert whole.end == ENDS[path]["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer_that_looked_like_reasoning(
    live, scripted, llm, monkeypatch, stream
):
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {"default": OPENED})
    scripted.script = scripted.says("It is 5. END of it")
    assert ask(live, CHAT, stream, stop=["END"]).text == "It is 5. "


@pytest.mark.parametrize("arguments", [ARGUMENTS, *BROKEN[:3]])
def test_clients_read_what_is_left_open(live, scripted, arguments):
    scripted.script = scripted.says(hermes(arguments))
    asked, model = [{"role": "user", "content": "x"}], live.service.names[0]
    size = len(scripted.llm.tokenizer.encode(hermes(arguments).partition("1")[0]))
    for max_tokens in (200, size):
        is_whole = arguments == ARGUMENTS and max_tokens > size
        with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
            how = {"messages": asked, "model": model, "tools": TOOLS[MESSAGES]}
            with client.messages.stream(max_tokens=max_tokens, **how) as stream:
                found = stream.get_final_message()
            assert (found.stop_reason == "tool_use") == (
                arguments == ARGUMENTS and max_tokens > size
            )
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
            how = {"input": "x", "model": model, "tools": TOOLS[RESPONSES]}
            with client.responses.stream(max_output_tokens=max_tokens, **how) as stream:
                ended = list(stream)[-1].response
            assert (ended.status == "completed") == is_whole


TEXTS = ["Hi 😀 日本 there", "😀😀", "é", "plain", "👩‍👩‍👧 x"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_are_places_in_the_text(live, scripted, text, stream, echo):
    scripted.script = scripted.says(text)
    given = {"prompt": "日本 😀 x", "logprobs": 1, "echo": echo, "stream": stream, "max_tokens": 50}
    found = live.post("/v1/completions", given)
    parts = [c for e in (events_of(found) if stream else [found.json()]) for c in e["choices"]]
    whole = "".join(each["text"] for each in parts)
    assert whole == (given["prompt"] if echo else "") + text
    logprobs = [each["logprobs"] for each in parts if each["logprobs"]]
    tokens = [token for each in logprobs for token in each["tokens"]]
    offsets = [offset for each in logprobs for offset in each["text_offset"]]
    assert "\ufffd" in "".join(tokens) or text in ("é", "plain")
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" in token:  # a part of a character stands where that does
            assert ord(whole[offset]) > 127
        elif offset < len(whole):
            assert whole.startswith(token, offset)
