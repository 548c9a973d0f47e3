"""An LLM and further processes: forked ones are told, others open the model again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import time

import pytest

from rooflax import LLM, AsyncLLM, RequestError
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.nn.execution import ExecutionOptions

pytestmark = pytest.mark.oldest_jax

TINY, PROMPT = "preset:gpt2-tiny", [5, 6, 7]
GREEDY = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def llm():
    found = LLM(TINY, max_model_len=128, options=ExecutionOptions(decode_steps=1))
    found.generate(PROMPT, **GREEDY)
    return found


@pytest.fixture(scope="module")
def served():
    found = AsyncLLM(TINY, max_model_len=64, max_num_seqs=2, max_tokens_per_step=32)
    yield found
    asyncio.run(found.shutdown())


def in_fork(work, seconds=20.0):
    """What a forked process gives, as text; an error as its class and sentence."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the forked process hangs")
        time.sleep(0.02)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told(llm, served):
    async def stream(prompt):
        return [delta async for delta in served.stream(prompt, **GREEDY)]

    def locked():
        with llm._lock:  # as a thread may hold it while another one forks
            return in_fork(lambda: llm.generate(PROMPT, **GREEDY))

    said = [locked()] + [
        in_fork(work)
        for work in (
            lambda: llm.score([PROMPT]),
            lambda: llm.logits(PROMPT),
            lambda: LLM(TINY),
            lambda: AsyncLLM(TINY),
            lambda: asyncio.run(stream(PROMPT)),
            lambda: asyncio.run(stream("x" * 5000)),
            lambda: asyncio.run(served.generate(PROMPT, json_schema={"type": "null"}, **GREEDY)),
            lambda: asyncio.run(served.chat([{"role": "user", "content": "x"}])),
        )
    ]
    wanted = "RequestError: This process was forked from one that had used its devices, whose"
    assert [each[: len(wanted)] for each in said] == [wanted] * len(said)
    ids = llm.encode("def f(x):")
    assert in_fork(lambda: (llm.encode("def f(x):"), llm.decode(ids))) == repr(
        (ids, llm.decode(ids))
    )
    assert llm.generate(PROMPT, **GREEDY)[0].tokens  # of the parent nothing has changed


def say(llm):
    return llm.generate(PROMPT, **GREEDY)


def test_another_process_opens_the_model_again(llm):
    wanted = llm.generate(PROMPT, **GREEDY)[0].tokens
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.apply(say, (llm,))
    assert found.tokens == wanted


def test_a_pickle_is_the_recipe(llm):
    data = pickle.dumps(llm)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert (again.max_model_len, again.options) == (llm.max_model_len, llm.options)
    assert again.generate(PROMPT, **GREEDY)[0].tokens == llm.generate(PROMPT, **GREEDY)[0].tokens
    for made in (model_info(TINY), make_plan(TINY)):
        with pytest.raises(RequestError, match=f"made of a {type(made).__name__} does not pickle"):
            pickle.dumps(LLM(made))
