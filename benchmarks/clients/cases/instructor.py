import check
import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=12)
    cold: bool


def ask(mode):
    client = openai.OpenAI(base_url=f"{check.URL}/v1", api_key="any", max_retries=0)
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=check.NAME,
        response_model=City,
        max_tokens=80,
        max_retries=0,
        messages=[{"role": "user", "content": "Oslo"}],
    )
    assert isinstance(found, City)


def json_schema():
    ask(instructor.Mode.JSON_SCHEMA)


def tools():
    ask(instructor.Mode.TOOLS)


check.run(json_schema, tools)
