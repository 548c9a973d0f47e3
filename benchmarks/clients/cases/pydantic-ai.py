import check
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

LIMIT = {"max_tokens": 80, "temperature": 0}


class City(BaseModel):
    city: str = Field(max_length=12)
    cold: bool


def model(url):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    return OpenAIChatModel(check.NAME, provider=OpenAIProvider(openai_client=client))


def text():
    assert "rooflax" in Agent(model(check.URL)).run_sync("Who are you?").output


def tools():
    agent, asked = Agent(model(check.SCRIPTED)), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Weather of a city"""
        asked.append(city)
        return "12 degrees"

    assert agent.run_sync(check.ASK).output == "It is 12 degrees." and asked == ["Oslo"]


def output_by_tool():
    agent = Agent(model(check.URL), output_type=ToolOutput(City), model_settings=LIMIT)
    assert isinstance(agent.run_sync("Oslo").output, City)


def native_output():
    agent = Agent(model(check.URL), output_type=NativeOutput(City), model_settings=LIMIT)
    assert isinstance(agent.run_sync("Oslo").output, City)


check.run(text, tools, output_by_tool, native_output)
