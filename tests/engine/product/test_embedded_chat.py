"""The embedded chat model: what its card says is so, and it answers, calls tools and remembers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from rooflax import LLM, AsyncLLM, RequestError
from rooflax.loading.model_info import embedded_folder
from rooflax.models.presets import CHAT_NAME

pytestmark = pytest.mark.oldest_jax

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHAT_NAME)


def ask(llm: LLM, *messages: str, **how: object) -> str:
    roles = ("user", "assistant") * len(messages)
    turns = [{"role": r, "content": m} for r, m in zip(roles, messages, strict=False)]
    return llm.chat(turns, max_tokens=120, **how)[0].text  # type: ignore[arg-type]


def test_it_is_small() -> None:
    folder = embedded_folder(CHAT_NAME)
    assert (folder / "model.safetensors").stat().st_size <= 10_000_000


@pytest.mark.every_jax
def test_it_answers(llm: LLM) -> None:
    assert "rooflax-chat" in ask(llm, "Who are you?")
    assert "len([4, 5, 6])" in ask(llm, "What does len do?")
    assert "def " in ask(llm, "Write a function that adds two numbers.")


def test_it_remembers_and_writes_json(llm: LLM) -> None:
    told = ("My name is Ada.", "Nice to meet you, Ada!", "What is my name?")
    assert "Ada" in ask(llm, *told)
    found = ask(llm, "Give me JSON with name Emma, age 31.")
    assert json.loads(found) == {"name": "Emma", "age": 31}


def test_it_calls_a_tool(llm: LLM) -> None:
    found = ask(llm, "What is the weather in Oslo?", tools=[TOOL])
    call = re.fullmatch(r"<tool_call>\s*(.*)\s*</tool_call>", found.strip(), re.DOTALL)
    assert call is not None, found
    assert json.loads(call[1]) == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_a_system_message_is_obeyed(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Answer in capital letters."},
        {"role": "user", "content": "How are you?"},
    ]
    (found,) = llm.chat(messages, max_tokens=60)
    assert found.text.isupper() and found.finish_reason == "stop"


def test_transformers_gives_the_same_ids_and_greedy_tokens(llm: LLM) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    folder = embedded_folder(CHAT_NAME)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What does sum do?"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=[TOOL])
    ids = llm.encode_chat(messages, tools=[TOOL])
    assert list(getattr(theirs, "input_ids", theirs)) == ids
    out = model.generate(torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    (ours,) = llm.generate([ids], max_tokens=24, temperature=0.0, ignore_eos=True)
    assert list(ours.tokens) == out[0, len(ids) :].tolist()


def test_conversations_at_once_get_the_answers_they_get_alone(llm):
    conversations = [[{"role": "user", "content": f"What is {word}?"}] for word in ("len", "max")]
    wanted = [c.text for c in llm.chat(conversations, max_tokens=40, temperature=0)]

    async def together() -> list[str]:
        async with AsyncLLM(CHAT_NAME, max_num_seqs=2, max_model_len=256) as engine:
            asked = (engine.chat(one, max_tokens=40, temperature=0) for one in conversations)
            with pytest.raises(RequestError, match="role"):
                await engine.chat([{"content": "who?"}])
            return [found[0].text for found in await asyncio.gather(*asked)]

    assert asyncio.run(together()) == wanted
