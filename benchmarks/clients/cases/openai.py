import json

import check
import openai
from pydantic import BaseModel

strict = openai.OpenAI(
    base_url=f"{check.URL}/v1", api_key="any", max_retries=0, _strict_response_validation=True
)
plain = openai.OpenAI(base_url=f"{check.URL}/v1", api_key="any", max_retries=0)
WHO = [{"role": "user", "content": "Who are you?"}]


class City(BaseModel):
    city: str
    cold: bool


def models():
    assert check.NAME in [model.id for model in strict.models.list()]


def chat():
    answer = strict.chat.completions.create(model=check.NAME, messages=WHO)
    assert "rooflax" in answer.choices[0].message.content


def chat_streamed():
    whole = strict.chat.completions.create(model=check.NAME, messages=WHO, temperature=0)
    chunks = plain.chat.completions.create(
        model=check.NAME,
        messages=WHO,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = list(chunks)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def tools():
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = strict.chat.completions.create(
            model=check.NAME,
            messages=[{"role": "user", "content": check.ASK}],
            tools=[check.WEATHER],
            tool_choice=choice,
            max_tokens=80,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"]


def parse():
    answer = plain.chat.completions.parse(
        model=check.NAME, messages=WHO, response_format=City, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def responses():
    answer = strict.responses.create(model=check.NAME, input="Who are you?")
    assert "rooflax" in answer.output_text


def responses_streamed():
    with plain.responses.stream(model=check.NAME, input="Who are you?") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text != ""


def completions():
    answer = plain.completions.create(
        model=check.NAME, prompt=["def f(", "x ="], max_tokens=5, n=2, echo=True, logprobs=2
    )
    assert len(answer.choices) == 4 and answer.choices[0].text.startswith("def f(")


def errors():
    for wrong, kind in (
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
    ):
        try:
            plain.chat.completions.create(**{"model": check.NAME, "messages": WHO, **wrong})
        except kind as error:
            said = error.body["message"]
        else:
            raise AssertionError(wrong)
        assert said


def stored_history():
    """An agent that stores the client's own objects, and results of calls as they come."""
    scripted = openai.OpenAI(base_url=f"{check.SCRIPTED}/v1", api_key="any", max_retries=0)
    ask = {"model": check.NAME, "tools": [check.WEATHER]}
    turns = [{"role": "user", "content": check.ASK}]
    message = scripted.chat.completions.create(messages=turns, **ask).choices[0].message
    stored = message.model_dump()
    first = stored["tool_calls"][0]
    empty = {**first, "id": "call_2", "function": {"name": "now", "arguments": ""}}
    stored["tool_calls"] = [first, empty]
    turns += [
        stored,
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": first["id"], "content": "12 degrees"},
    ]
    answer = scripted.chat.completions.create(messages=turns, **ask).choices[0].message
    assert answer.content == "It is 12 degrees."
    chunks = scripted.chat.completions.create(messages=turns, stream=True, **ask)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.content
    tool = {"type": "function", **check.WEATHER["function"]}
    asked = {"role": "user", "content": check.ASK}
    output = scripted.responses.create(model=check.NAME, input=[asked], tools=[tool]).output
    items = [item.model_dump() for item in output]
    call = next(item["call_id"] for item in items if item["type"] == "function_call")
    late = {"role": "developer", "content": "Be brief."}
    result = {"type": "function_call_output", "call_id": call, "output": "12 degrees"}
    given = [asked, *items, late, result]
    answer = scripted.responses.create(model=check.NAME, input=given, tools=[tool])
    assert answer.output_text == "It is 12 degrees."


check.run(
    models, chat, chat_streamed, tools, parse, responses, responses_streamed, completions, errors,
    stored_history,
)  # fmt: skip
