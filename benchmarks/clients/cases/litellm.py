import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import check
import litellm

WHO = [{"role": "user", "content": "Who are you?"}]


def ask(provider, url=None, **more):
    return litellm.completion(
        model=f"{provider}/{check.NAME}",
        api_base=f"{url or check.URL}/v1",
        api_key="any",
        max_tokens=60,
        temperature=0,
        num_retries=0,
        **{"messages": WHO, **more},
    )


def both(provider):
    whole = ask(provider).choices[0].message.content
    text = "".join(c.choices[0].delta.content or "" for c in ask(provider, stream=True))
    assert whole == text and "rooflax" in whole


def openai():
    both("openai")


def hosted_vllm():
    both("hosted_vllm")


def tools():
    asked = [{"role": "user", "content": check.ASK}]
    answer = ask("hosted_vllm", check.SCRIPTED, messages=asked, tools=[check.WEATHER])
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": check.CITY}}
    assert ask("openai", response_format=form).choices[0].message.content.startswith("{")


check.run(openai, hosted_vllm, tools, json_schema)
