"""Random requests, valid and not, beside victims: nobody notices the others.

A thousand nightly, `REQUESTS=10000 pytest tests/nightly/test_request_fuzz.py` for more.
"""

import asyncio
import random

from rooflax import RequestError, SamplingParams
from rooflax.async_llm import AsyncLLM
from rooflax.errors import EngineError

VOCAB, CONTEXT = 4096, 160
VICTIM = SamplingParams(max_tokens=24, temperature=0.9, seed=3, top_k=50, ignore_eos=True)
PROMPT = [(13 * i + 5) % 900 for i in range(37)]
AT_ONCE = 12


def random_value(state, name):
    """Mostly a value that is meant, sometimes one at a limit or far beyond it."""
    ids = [state.randrange(VOCAB) for _ in range(state.randrange(4))]
    wild = state.choice([2**31, -1, VOCAB, 2**63, 0, 1, 1e308, float("nan"), "x", None, (), True])
    meant = {
        "max_tokens": state.randrange(1, 40), "min_tokens": state.randrange(0, 12),
        "temperature": state.choice([0, 0.5, 1, 2]), "top_k": state.randrange(100),
        "top_p": state.uniform(0.05, 1), "min_p": state.uniform(0, 1),
        "seed": state.randrange(2**32), "stop": [state.choice(["a", "xyz", " "])],
        "stop_token_ids": ids, "repetition_penalty": state.uniform(0.5, 2),
        "presence_penalty": state.uniform(-2, 2), "frequency_penalty": state.uniform(-2, 2),
        "logit_bias": {i: state.uniform(-100, 100) for i in ids}, "allowed_token_ids": ids,
        "banned_token_ids": ids, "logprobs": state.randrange(21), "n": state.randrange(1, 4),
        "prompt_logprobs": state.randrange(4), "num_beams": state.randrange(1, 4),
        "ignore_eos": state.random() < 0.5, "regex": state.choice(REGEXES),
    }  # fmt: skip
    return wild if state.random() < 0.15 else meant[name]


NAMES = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop",
    "stop_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "banned_token_ids", "logprobs", "n", "prompt_logprobs", "num_beams",
    "ignore_eos", "regex",
)  # fmt: skip
REGEXES = ("[a-z ]{1,30}", "(import|export) [a-z]+;", "x{20}y?")


async def one(server, state):
    """A random request to its end, or until it is rejected or abandoned; how it ended."""
    ids = [state.randrange(VOCAB) for _ in range(state.randrange(0, CONTEXT + 3))]
    if state.random() < 0.1 and ids:
        ids[state.randrange(len(ids))] = state.choice([-1, VOCAB, 2**31, 2**63])
    salt = state.choice(["", "", "", "tenant", "\ud800", 7, None])
    given = {name: random_value(state, name) for name in state.sample(NAMES, state.randrange(6))}
    given.setdefault("max_tokens", state.randrange(1, 30))
    leaves = state.randrange(1, 20) if state.random() < 0.2 else None
    try:
        stream = server.stream(ids, SamplingParams(**given), cache_salt=salt)
        async for number, _ in aenumerate(stream):
            if number == leaves:
                await stream.aclose()
                return "left"
    except RequestError:
        return "rejected"
    except EngineError as error:  # where nothing may be chosen, or a form is done too early
        known = ("No token was left", "The grammar")
        return "ended" if any(text in str(error) for text in known) else f"{given}: {error}"
    return "done"


async def aenumerate(stream):
    number = 0
    async for item in stream:
        yield number, item
        number += 1


def run(count):
    sizes = {"max_num_seqs": 6, "max_model_len": CONTEXT, "max_waiting": 10_000}
    server = AsyncLLM("preset:gpt2-tiny", **sizes, kv_blocks=(32,))
    state, ended = random.Random(0), []

    async def crowd(share):
        for _ in range(share):
            ended.append(await one(server, state))

    async def main():
        alone = (await server.generate(PROMPT, VICTIM))[0].tokens
        others = [asyncio.create_task(crowd(count // AT_ONCE)) for _ in range(AT_ONCE)]
        victims = 0
        while not all(task.done() for task in others):
            (found,) = await server.generate(PROMPT, VICTIM)
            assert found.tokens == alone
            victims += 1
        await asyncio.gather(*others)
        await server.generate(PROMPT, VICTIM)
        metrics = server.metrics()
        await server.shutdown()
        return victims, metrics

    victims, metrics = asyncio.run(main())
    assert victims > 0
    assert metrics["num_compilations"] == 0
    assert not any(metrics["blocks_used"])
    assert metrics["num_preemptions"] > 0  # there are blocks for three of six at their longest
    assert {"done", "rejected", "left"} <= set(ended) <= {"done", "rejected", "left", "ended"}
    return ended, victims


def test_random_requests_beside_a_victim():
    run(240)
