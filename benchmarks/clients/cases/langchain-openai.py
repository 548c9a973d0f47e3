import check
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def model(url, **more):
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="any",
        model=check.NAME,
        max_retries=0,
        temperature=0,
        max_tokens=60,
        **more,
    )


def get_weather(city: str) -> str:
    """Weather of a city"""


class City(BaseModel):
    """A city"""

    city: str
    cold: bool


def invoke():
    assert "rooflax" in model(check.URL).invoke("Who are you?").content


def streamed():
    whole = model(check.URL).invoke("Who are you?").content
    assert "".join(c.content for c in model(check.URL).stream("Who are you?")) == whole


def tools():
    bound = model(check.SCRIPTED).bind_tools([get_weather])
    first = bound.invoke(check.ASK)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    turns = [("user", check.ASK), first, ToolMessage("12 degrees", tool_call_id=call["id"])]
    assert bound.invoke(turns).content == "It is 12 degrees."


def structured_output():
    for method in ("json_schema", "function_calling"):
        found = model(check.URL).with_structured_output(City, method=method).invoke("Oslo")
        assert isinstance(found, City)


def responses():
    found = model(check.URL, use_responses_api=True).invoke("Who are you?")
    assert "rooflax" in found.text if isinstance(found.text, str) else "rooflax" in found.text()


check.run(invoke, streamed, tools, structured_output, responses)
