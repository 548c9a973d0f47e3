"""The `openai` package against a real engine with the embedded chat model, as a client has them."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest

from rooflax.models.presets import CHAT_NAME
from tests.engine.product.test_embedded_chat import TOOL
from tests.support.product.snippets import ROOT, snippets
from tests.support.server.live import wait_for

pytestmark = pytest.mark.oldest_jax

QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def test_models(strict):
    (found,) = strict.models.list().data
    assert (found.id, found.owned_by) == (CHAT_NAME, "rooflax")
    assert strict.models.retrieve(CHAT_NAME).id == CHAT_NAME


def test_chat_whole_streamed_and_alone_say_the_same(strict, alone):
    wanted = alone.chat(QUESTION, max_tokens=60)[0]
    found = strict.chat.completions.create(model=CHAT_NAME, messages=QUESTION, max_tokens=60)
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].finish_reason == wanted.finish_reason == "stop"
    assert found.usage.completion_tokens == len(wanted.tokens)
    chunks = list(
        strict.chat.completions.create(
            model=CHAT_NAME,
            messages=QUESTION,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == wanted.text
    assert chunks[-1].usage.completion_tokens == len(wanted.tokens)
    assert chunks[0].choices[0].delta.role == "assistant"


def test_c15_many_at_once_say_what_each_says_alone(served, alone):
    questions = ["Who are you?", "What does len do?", "How are you?", "What does sum do?"] * 3

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            asked = [
                client.chat.completions.create(
                    model=CHAT_NAME, messages=[{"role": "user", "content": q}], max_tokens=40
                )
                for q in questions
            ]
            return [found.choices[0].message.content for found in await asyncio.gather(*asked)]

    told = asyncio.run(ask())
    wanted = {
        q: alone.chat([{"role": "user", "content": q}], max_tokens=40)[0].text for q in questions
    }
    assert told == [wanted[q] for q in questions]


def test_completions_echo_with_logprobs_and_samples(client, alone):
    prompt = "def add(a, b):"
    wanted = alone.generate([prompt], max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=2)[
        0
    ]
    found = client.completions.create(
        model=CHAT_NAME, prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=2
    )
    choice = found.choices[0]
    assert choice.text == prompt + wanted.text
    assert choice.logprobs.token_logprobs[0] is None
    given = [one.logprob for one in (*wanted.prompt_logprobs, *wanted.logprobs)]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(given, abs=1e-5)
    assert "".join(choice.logprobs.tokens) == choice.text
    found = client.completions.create(
        model=CHAT_NAME, prompt=prompt, max_tokens=8, n=3, seed=5, temperature=1
    )
    again = client.completions.create(
        model=CHAT_NAME, prompt=prompt, max_tokens=8, n=3, seed=5, temperature=1
    )
    assert [c.text for c in found.choices] == [c.text for c in again.choices]
    assert len({c.text for c in found.choices}) > 1


def test_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    given = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": schema, "strict": True},
    }
    question = [{"role": "user", "content": "Give me JSON with name Emma, age 31."}]
    found = client.chat.completions.create(
        model=CHAT_NAME, messages=question, response_format=given, max_tokens=100
    )
    assert json.loads(found.choices[0].message.content) == {"name": "Emma", "age": 31}
    found = client.chat.completions.create(
        model=CHAT_NAME, messages=question, response_format={"type": "json_object"}, max_tokens=100
    )
    assert isinstance(json.loads(found.choices[0].message.content), dict)


def test_a_tool_is_called_and_its_answer_goes_back(strict):
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    found = strict.chat.completions.create(model=CHAT_NAME, messages=question, tools=[TOOL])
    choice = found.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    messages = [
        *question,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7}'},
    ]
    found = strict.chat.completions.create(model=CHAT_NAME, messages=messages, tools=[TOOL])
    assert found.choices[0].message.content


def test_a_forced_call_is_valid_whatever_was_asked(strict):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        found = strict.chat.completions.create(
            model=CHAT_NAME,
            messages=QUESTION,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=100,
        )
        (call,) = found.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)  # the schema allows others beside it
        assert isinstance(arguments["city"], str)


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=CHAT_NAME, messages=QUESTION, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=CHAT_NAME, messages=QUESTION, max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"


def test_clients_that_leave_leave_nothing_behind(served, client):
    engine = served.service.engine
    for number in range(20):
        stream = client.chat.completions.create(
            model=CHAT_NAME, messages=QUESTION, max_tokens=400, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _, _ in zip(range(number % 4), stream, strict=False):
            pass
        stream.close()
    served.settle()
    wait_for(lambda: engine.health().num_open == 0)
    assert not any(engine._thread.engine.scheduler.blocks.num_used)
    assert not engine._inboxes
    assert served.service.cancelled["disconnect"] >= 10


def test_the_snippets_of_the_docs_run(served, capsys):
    namespace = {}
    found = snippets("docs/server.md", "python")
    usage = [each for each in snippets("docs/usage.md", "python") if "openai.OpenAI" in each.code]
    for snippet in (*usage, *found):
        code = snippet.code.replace("http://127.0.0.1:8000", served.url)
        exec(compile(code, f"docs/server.md:{snippet.line}", "exec"), namespace)
    for name in ("client", "anthropic_client"):
        namespace[name].close()
    out = capsys.readouterr().out
    assert len(found) == 4 and len(usage) == 1
    assert out.count("rooflax-chat") == 2 and out.count("len([4, 5, 6])") == 2
    assert 'get_weather {"city": "Oslo"}' in out


def test_metrics_are_prometheus(served, client):
    from prometheus_client.parser import text_string_to_metric_families

    client.chat.completions.create(model=CHAT_NAME, messages=QUESTION)
    text = served.http.get("/metrics").text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens",
        "prompt_tokens_cached", "generation_tokens", "num_preemptions", "request_success",
        "prefix_cache_queries", "prefix_cache_hits", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds",
        "request_params_max_tokens", "request_params_n", "iteration_tokens_total",
    ):  # fmt: skip
        assert found[f"vllm:{name}"].samples, name
    tokens = found["vllm:generation_tokens"].samples[0]
    assert tokens.labels == {"model_name": CHAT_NAME, "engine": "0"} and tokens.value > 0
    assert found["rooflax:compilations_after_warmup"].samples
    sums = {s.name: s.value for family in found.values() for s in family.samples}
    parts = [
        sums[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")
    ]
    assert sum(parts) <= sums["vllm:e2e_request_latency_seconds_sum"] and parts[2] > 0
    blocks = {s.labels["state"]: s.value for s in found["rooflax:kv_blocks"].samples}
    assert blocks["free"] > 0 and set(blocks) == {"used", "free"}
    answered = {s.labels["route"] for s in found["rooflax:http_requests"].samples}
    assert "/v1/chat/completions" in answered


def test_the_dashboard_and_the_manifests_ask_for_metrics_that_are_there(served):
    from prometheus_client.parser import text_string_to_metric_families

    text = served.http.get("/metrics").text
    known = {}
    for family in text_string_to_metric_families(text):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        known |= {f"{family.name}{end}": family for end in ends.get(family.type, [""])}
    board = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    panels = json.loads(board)["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"(?:vllm|rooflax):\w+", expr)}
    assert len(panels) >= 12 and len(names) >= 20
    names |= {
        name
        for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml")
        for name in re.findall(r"(?:vllm|rooflax):[a-z]\w+", path.read_text(encoding="utf-8"))
    }
    names -= {"vllm:lora_requests_info"}  # where there are adapters: tests/engine/test_loras.py
    assert names <= set(known), names - set(known)
    for expr in asked:
        labels = set(re.findall(r"by \((\w+)\)", expr)) | set(re.findall(r"(\w+)=\"", expr))
        for name in re.findall(r"(?:vllm|rooflax):\w+", expr):
            if known[name].samples:
                seen = {label for sample in known[name].samples for label in sample.labels}
                assert labels <= seen, (expr, seen)
