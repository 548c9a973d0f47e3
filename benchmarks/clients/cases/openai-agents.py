import asyncio

import check
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city"""
    asked.append(city)
    return "12 degrees"


def agent(kind):
    client = AsyncOpenAI(base_url=f"{check.SCRIPTED}/v1", api_key="any", max_retries=0)
    model = kind(model=check.NAME, openai_client=client)
    return Agent(name="a", model=model, tools=[get_weather])


def loop(kind):
    asked.clear()
    found = asyncio.run(Runner.run(agent(kind), check.ASK))
    assert (found.final_output, asked) == ("It is 12 degrees.", ["Oslo"])


def chat():
    loop(OpenAIChatCompletionsModel)


def responses():
    loop(OpenAIResponsesModel)


def streamed(kind=OpenAIResponsesModel):
    async def run():
        found = Runner.run_streamed(agent(kind), check.ASK)
        async for _ in found.stream_events():
            pass
        return found.final_output

    assert asyncio.run(run()) == "It is 12 degrees."


def chat_streamed():
    streamed(OpenAIChatCompletionsModel)


check.run(chat, chat_streamed, responses, streamed)
