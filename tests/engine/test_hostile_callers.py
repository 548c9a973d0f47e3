"""What callers may say or do at the wrong moment: rejected in time, and nobody else notices."""

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rooflax import (
    LLM,
    AsyncLLM,
    EngineError,
    ExecutionOptions,
    QueueFull,
    RequestError,
    SamplingParams,
    structured,
)
from rooflax.engine.engine import Engine
from rooflax.structured import MAX_COMPILING

pytestmark = pytest.mark.oldest_jax

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_model_len=256)


def test_text_that_cannot_fit_is_rejected_without_being_encoded(llm):
    longest = llm.tokenizer.longest_token
    assert longest is not None and longest < 128
    started = time.perf_counter()
    with pytest.raises(RequestError, match="20,000,000 characters and the context holds 256 tok"):
        llm.generate("x" * 20_000_000)
    with pytest.raises(RequestError, match="2000000 tokens and the context holds 256"):
        llm.generate([[5] * 2_000_000])
    assert time.perf_counter() - started < 0.5
    with pytest.raises(RequestError, match=r"257 tokens and the context holds 256; shorten"):
        llm.score([[1] * 257])


def test_stop_strings_have_a_limit():
    with pytest.raises(RequestError, match="stop has 65 strings"):
        SamplingParams(stop=["a"] * 65)
    with pytest.raises(RequestError, match="stop has 1 strings of 5000"):
        SamplingParams(stop="a" * 5000)


def test_a_penalty_that_float32_does_not_hold_is_rejected():
    with pytest.raises(RequestError, match="repetition_penalty is 1e-46"):
        SamplingParams(repetition_penalty=1e-46)


def test_threads_of_one_llm_take_turns(folder):
    llm = LLM(folder)
    prompts = [[5 + n, 6, 7] for n in range(4)]
    wanted = [llm.generate([prompt], GREEDY)[0].tokens for prompt in prompts]
    found = [[] for _ in prompts]

    def ask(index):
        for _ in range(4):
            found[index].append(llm.generate([prompts[index]], GREEDY)[0].tokens)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 4 for tokens in wanted]


@pytest.mark.parametrize("place", ["warm_up_prefill", "step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_llm_works_again_after_anything(folder, monkeypatch, place, error):
    llm = LLM(folder)
    wanted = llm.generate([[5, 6, 7]], GREEDY)[0].tokens
    original = getattr(Engine, place)

    def fail(self, *args):
        monkeypatch.setattr(Engine, place, original)
        self.runner.cache = None  # as after a program that took it
        raise error("once")

    monkeypatch.setattr(Engine, place, fail)
    with pytest.raises(error):
        llm.generate([[5, 6, 7]], GREEDY)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].tokens == wanted


class Panic(BaseException):
    """As a Rust library's."""


def test_a_panic_in_a_step_ends_nobody_else(folder, monkeypatch):
    async def crowd():
        async with AsyncLLM(folder, max_model_len=64, max_num_seqs=4) as server:
            (wanted,) = await server.generate([5, 6, 7], GREEDY)
            original = type(server._thread.engine.runner).run
            failed = []

            def once(self, *args):
                if not failed:
                    failed.append(True)
                    raise Panic("once")
                return original(self, *args)

            monkeypatch.setattr(type(server._thread.engine.runner), "run", once)
            found = await asyncio.gather(*(server.generate([5, 6, 7], GREEDY) for _ in range(3)))
            return wanted, [completion for (completion,) in found]

    wanted, found = asyncio.run(crowd())
    assert [completion.tokens for completion in found] == [wanted.tokens] * 3


def test_more_samples_than_may_ever_wait_are_a_request_error(folder):
    async def ask():
        async with AsyncLLM(folder, max_model_len=64, max_num_seqs=4, max_waiting=1) as server:
            with pytest.raises(RequestError, match="6 samples or beams, and at most 5") as caught:
                await server.generate([5, 6], GREEDY, n=6)
            return caught.value

    assert not isinstance(error := asyncio.run(ask()), QueueFull) and error.param == "n"


def test_gauges_fall_when_requests_leave_and_a_stop_string_is_a_stop(folder):
    async def ask():
        single = ExecutionOptions(decode_steps=1)
        async with AsyncLLM(folder, max_model_len=64, options=single) as server:
            (whole,) = await server.generate([5, 6, 7], GREEDY)
            (cut,) = await server.generate([5, 6, 7], GREEDY, stop=whole.text[1:3], max_tokens=60)
            task = asyncio.create_task(server.generate([5, 6, 7], GREEDY, max_tokens=50))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(100):
                if server.metrics()["num_running"] == 0:
                    break
                await asyncio.sleep(0.02)
            return cut, server.metrics()

    cut, metrics = asyncio.run(ask())
    assert cut.finish_reason == "stop"
    assert metrics["num_running"] == 0 and sum(metrics["blocks_used"]) == 0
    assert metrics["num_finished"]["stop"] == 1


@pytest.mark.parametrize("steps", [1, 32])
def test_what_comes_after_a_stop_string_cannot_fail_the_request(folder, steps):
    llm = LLM(folder, options=ExecutionOptions(decode_steps=steps))
    whole = llm.generate([[5, 6, 7]], GREEDY)[0]
    stop = whole.text[2:4]
    place = len(llm.generate([[5, 6, 7]], GREEDY, stop=stop)[0].tokens)
    assert place < 8
    table = np.array(llm.model.rope[0].cos)
    table[3 + 8 :] = np.nan  # what the model says of later positions
    rope = (llm.model.rope[0].__class__(table, llm.model.rope[0].sin), *llm.model.rope[1:])
    object.__setattr__(llm.model, "rope", rope)
    broken = llm.generate([[5, 6, 7]], GREEDY)[0]
    assert broken.finish_reason == "error"
    (cut,) = llm.generate([[5, 6, 7]], GREEDY, stop=stop)
    assert (cut.finish_reason, cut.error, len(cut.tokens)) == ("stop", None, place)


def test_a_compiled_form_waits_for_nobodys_compilation(folder):
    pytest.importorskip("llguidance")
    slow = '{"type": "integer", "multipleOf": 1000003}'

    async def crowd():
        async with AsyncLLM(max_model_len=128, max_num_seqs=4) as server:
            known = {"regex": "[a-z]+", "max_tokens": 4}
            await server.generate("x", **known)
            hostile = [
                asyncio.create_task(server.generate("x", json_schema=slow.replace("3", str(n))))
                for n in range(MAX_COMPILING)
            ]
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFull, match="wait to be compiled"):
                await server.generate("x", regex="another")
            started = time.perf_counter()
            await server.generate("x", **known)
            waited = time.perf_counter() - started
            same = slow.replace("3", str(MAX_COMPILING - 1))
            again = server.generate("x", json_schema=same, max_tokens=1)
            hostile.append(asyncio.create_task(again))  # takes no place of its own
            await asyncio.sleep(0.05)
            assert not hostile[-1].done()
            for task in hostile:
                task.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)
            started = time.perf_counter()
            await server.shutdown(drain=False)
            return waited, time.perf_counter() - started

    waited, closed = asyncio.run(crowd())
    assert waited < 3 and closed < 6


def test_a_form_that_takes_much_memory_is_rejected(llm, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(structured, "COMPILE_S", 120.0)  # of the two limits the one on memory
    with pytest.raises(RequestError, match=r"regex cannot be used: it takes \d+ MiB of memory"):
        llm.generate("x", regex="((((a{50}){50}){50}){50}){45}", max_tokens=2)


EXIT = """
import asyncio, sys
from rooflax import AsyncLLM
async def main():
    llm = AsyncLLM("preset:qwen2.5-tiny", max_model_len=256)
    for n in range(8):
        asyncio.create_task(llm.generate([n + 1, 2], max_tokens=200, temperature=0.0))
    await asyncio.sleep(0.1)
    sys.exit(7)
asyncio.run(main())
"""


def test_a_program_that_ends_while_requests_run_ends_as_it_wants():
    ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=False)
    assert ran.returncode == 7, ran.stderr
    assert "terminate" not in ran.stderr and "FATAL" not in ran.stderr


def test_the_engine_error_of_a_request_is_raised(folder):
    async def ask():
        async with AsyncLLM(folder, max_model_len=64, max_num_seqs=4) as server:
            server._thread._failure = "gone"
            with pytest.raises(EngineError, match="gone"):
                await server.generate([5, 6])
            server._thread._failure = None

    asyncio.run(ask())
