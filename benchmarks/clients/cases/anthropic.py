import anthropic
import check

client = anthropic.Anthropic(base_url=check.URL, api_key="any", max_retries=0)
ASK = {"model": check.NAME, "max_tokens": 80}
WHO = [{"role": "user", "content": "Who are you?"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": check.WEATHER["function"]["parameters"],
}


def messages():
    answer = client.messages.create(messages=WHO, **ASK)
    assert "rooflax" in answer.content[0].text and answer.stop_reason == "end_turn"


def streamed():
    with client.messages.stream(messages=WHO, **ASK) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text != ""


def tools():
    for choice in ("auto", "any"):
        answer = client.messages.create(
            messages=[{"role": "user", "content": check.ASK}],
            tools=[TOOL],
            tool_choice={"type": choice},
            **ASK,
        )
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert call.name == "get_weather" and call.input["city"]
        assert answer.stop_reason == "tool_use"


def tool_results():
    client = anthropic.Anthropic(base_url=check.SCRIPTED, api_key="any", max_retries=0)
    asked = {"role": "user", "content": check.ASK}
    first = client.messages.create(messages=[asked], tools=[TOOL], **ASK)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [
        asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=turns, tools=[TOOL], **ASK)
    assert answer.content[0].text == "It is 12 degrees."


def count_tokens():
    assert client.messages.count_tokens(model=check.NAME, messages=WHO).input_tokens > 5


def stored_history():
    """An agent that stores the client's own objects, with results of parallel calls as they come
    and a system message in the middle."""
    client = anthropic.Anthropic(base_url=check.SCRIPTED, api_key="any", max_retries=0)
    asked = {"role": "user", "content": check.ASK}
    with client.messages.stream(messages=[asked], tools=[TOOL], **ASK) as stream:
        first = stream.get_final_message()
    blocks = [block.model_dump() for block in first.content]
    (call,) = [block for block in blocks if block["type"] == "tool_use"]
    blocks.append({**call, "id": "toolu_2", "name": "now", "input": {}})
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon"},
        {"type": "tool_result", "tool_use_id": call["id"], "content": "12 degrees"},
    ]
    turns = [
        asked,
        {**first.model_dump(), "content": blocks},
        {"role": "user", "content": results[:1]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": results[1:]},
    ]
    answer = client.messages.create(messages=turns, tools=[TOOL], **ASK)
    assert answer.content[0].text == "It is 12 degrees."
    with client.messages.stream(messages=turns, tools=[TOOL], **ASK) as stream:
        assert stream.get_final_message().content[0].text == "It is 12 degrees."
    assert client.messages.count_tokens(model=check.NAME, messages=turns).input_tokens > 20


check.run(messages, streamed, tools, tool_results, count_tokens, stored_history)
