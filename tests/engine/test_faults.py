"""A fault ends one request: faults injected at every seam, beside requests that must not notice.

What is replaced here is what fails, never what is tested: how the engine and its thread take it.
"""

import asyncio

import jax
import numpy as np
import pytest

from rooflax import RequestError, SamplingParams
from rooflax.async_llm import AsyncLLM
from rooflax.engine import packing
from rooflax.engine.features.speculation import NgramDrafter
from rooflax.engine.sequence import StepOutput
from rooflax.errors import EngineError
from rooflax.nn.execution import ExecutionOptions

PARAMS = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i + k) % 900 + 1 for i in range(10 + k)] for k in range(6)]
BAD = PROMPTS[2]


class Panic(BaseException):
    """As a Rust library's panic: no Exception."""


@pytest.fixture(scope="module")
def server():
    options = ExecutionOptions(decode_steps=1)
    llm = AsyncLLM("preset:gpt2-tiny", max_num_seqs=4, max_model_len=128, options=options)
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def alone(server):
    async def run():
        return [(await server.generate(prompt, PARAMS))[0].tokens for prompt in PROMPTS]

    return asyncio.run(run())


def together(server, params=None):
    async def run():
        calls = [server.generate(p, (params or {}).get(tuple(p), PARAMS)) for p in PROMPTS]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def check(server, found, alone, message):
    """Only the bad one ended, and the server is as before."""
    for prompt, result, tokens in zip(PROMPTS, found, alone, strict=True):
        if prompt == BAD:
            assert isinstance(result, EngineError) and message in str(result)
        else:
            assert result[0].tokens == tokens
    assert not any(server.metrics()["blocks_used"])
    assert server.metrics()["num_compilations"] == 0
    assert asyncio.run(server.generate(BAD, PARAMS))[0].tokens == alone[2]


def failing_for_bad(monkeypatch, runner, after=0, takes_the_cache=True):
    """Calls with BAD fail once it has so many tokens."""
    run = runner.run

    def failing(call, num_steps):
        if any(s.prompt_tokens == BAD and s.num_output_tokens >= after for s in call.sequences):
            if takes_the_cache:  # as a donated one is gone when a program fails
                for leaf in jax.tree.leaves(runner.cache):
                    leaf.delete()
                runner.lost_state = True
            raise RuntimeError("injected")
        return run(call, num_steps)

    monkeypatch.setattr(runner, "run", failing)


@pytest.mark.parametrize("takes_the_cache", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_fails_ends_who_fails_apart(server, alone, monkeypatch, takes_the_cache, after):
    failing_for_bad(monkeypatch, server._thread.engine.runner, after, takes_the_cache)
    found = together(server)
    monkeypatch.undo()
    check(server, found, alone, "injected")


def test_suspects_run_apart_also_behind_others_in_the_queue(server, alone, monkeypatch):
    """Prompts with scores are calls of their own, so that they are no suspects."""
    failing_for_bad(monkeypatch, server._thread.engine.runner)
    scored = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, prompt_logprobs=1)
    found = together(server, {tuple(PROMPTS[k]): scored for k in (0, 3)})
    monkeypatch.undo()
    check(server, found, alone, "injected")


def test_who_ended_in_a_step_that_then_broke_is_answered(server, alone, monkeypatch):
    """BAD ends when it fails again; then there is no memory for the new cache."""
    runner = server._thread.engine.runner
    failing_for_bad(monkeypatch, runner)
    reset, resets = runner.reset, []

    def failing():
        resets.append(1)
        if len(resets) == 2:
            raise RuntimeError("no memory")
        reset()

    monkeypatch.setattr(runner, "reset", failing)

    async def run():
        calls = (server.generate(prompt, PARAMS) for prompt in PROMPTS)
        async with asyncio.timeout(60):
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(run())
    assert isinstance(found[2], EngineError)
    monkeypatch.undo()
    assert [together(server)[k][0].tokens for k in range(6)] == alone
    assert not any(server.metrics()["blocks_used"])


def test_parameters_that_fail_leave_the_neighbours_with_their_own(server, alone, monkeypatch):
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=1, ignore_eos=True)
    together(server, {tuple(prompt): drawn for prompt in PROMPTS})  # what the slots had before
    write = packing.write_params

    def failing(row, sequence):
        if sequence.prompt_tokens == BAD:
            row[:] = -1
            raise RuntimeError("injected")
        write(row, sequence)

    monkeypatch.setattr(packing, "write_params", failing)
    found = together(server)
    monkeypatch.undo()
    check(server, found, alone, "injected")


def test_a_fault_that_does_not_come_back_ends_nobody(server, alone, monkeypatch):
    runner = server._thread.engine.runner
    run, calls = runner.run, []

    def failing(call, num_steps):
        calls.append(call)
        if len(calls) == 4:
            raise RuntimeError("once")
        return run(call, num_steps)

    monkeypatch.setattr(runner, "run", failing)
    found = together(server)
    assert [result[0].tokens for result in found] == alone


def test_an_index_outside_its_array_is_an_error_of_the_kernel(server, alone, monkeypatch):
    """Below everything Python checks: a block number that the pool does not have."""
    runner = server._thread.engine.runner
    inputs = runner._inputs

    def broken(call, num_steps, exchange=0):
        step, rows = inputs(call, num_steps, exchange)
        numbers = np.arange(step.layout.sequences)[rows]
        for sequence, row in zip(call.sequences, numbers, strict=True):
            if sequence.prompt_tokens == BAD:
                columns = step.layout.split(step.packed)[1]
                columns[row, -1] = columns[row, packing.FIRST] = 10**6
        return step, rows

    monkeypatch.setattr(runner, "_inputs", broken)
    found = together(server)
    monkeypatch.undo()
    check(server, found, alone, "outside the pool")


@pytest.mark.parametrize("error", [RuntimeError("injected"), Panic("injected")])
@pytest.mark.parametrize("seam", ["mask", "accept"])
def test_a_grammar_that_fails_ends_its_request(server, alone, monkeypatch, seam, error):
    from rooflax.structured import GrammarConstraint

    def failing(*_):
        raise error

    monkeypatch.setattr(GrammarConstraint, seam, property(failing) if seam == "mask" else failing)
    constrained = SamplingParams(max_tokens=9, temperature=0, regex="[a-z ]+")
    found = together(server, {tuple(BAD): constrained})
    monkeypatch.undo()
    check(server, found, alone, "injected")


def test_a_detokenizer_that_fails_ends_its_request(server, alone, monkeypatch):
    from rooflax.completion import Sample

    take = Sample.take

    def failing(sample, *rest):
        if sample.sequence.prompt_tokens == BAD:
            raise EngineError("injected")
        return take(sample, *rest)

    monkeypatch.setattr(Sample, "take", failing)
    found = together(server)
    monkeypatch.undo()
    check(server, found, alone, "injected")


def test_a_delivery_that_fails_aborts_its_request(server, alone, monkeypatch):
    deliver = server._thread._deliver
    failed = []

    def failing(outputs: list[StepOutput]):
        mine = [o for o in outputs if o.sequence.prompt_tokens == BAD]
        if mine:
            failed.append(mine)
            raise RuntimeError("injected")
        deliver(outputs)

    monkeypatch.setattr(server._thread, "_deliver", failing)

    async def run():
        calls = [asyncio.create_task(server.generate(p, PARAMS)) for p in PROMPTS]
        others = [call for call, p in zip(calls, PROMPTS, strict=True) if p != BAD]
        done = await asyncio.gather(*others)
        calls[2].cancel()
        return [result[0].tokens for result in done]

    found = asyncio.run(run())
    monkeypatch.undo()
    assert failed
    assert found == [tokens for tokens, p in zip(alone, PROMPTS, strict=True) if p != BAD]
    assert asyncio.run(server.generate(BAD, PARAMS))[0].tokens == alone[2]
    assert not any(server.metrics()["blocks_used"])


def test_a_dead_thread_answers_everybody_at_once(monkeypatch):
    options = ExecutionOptions(decode_steps=1)
    llm = AsyncLLM("preset:gpt2-tiny", max_num_seqs=2, max_model_len=128, options=options)
    engine = llm._thread.engine
    step = llm._thread._step

    def failing():
        if any(s.num_output_tokens > 2 for s in engine.scheduler.running):
            raise Panic("the end")
        return step()

    monkeypatch.setattr(llm._thread, "_step", failing)

    async def run():
        calls = (llm.generate(prompt, PARAMS) for prompt in PROMPTS)
        async with asyncio.timeout(60):
            return await asyncio.gather(*calls, return_exceptions=True)

    for result in asyncio.run(run()):
        assert isinstance(result, EngineError) and "the end" in str(result)
    with pytest.raises(EngineError, match=r"thread ended: the end"):
        asyncio.run(llm.generate(BAD, PARAMS))


HOSTILE = [
    {"stop_token_ids": (2**31,)},
    {"stop_token_ids": (4096,)},
    {"min_tokens": 2**31},
    {"min_tokens": 119},
    {"logit_bias": {4096: 1.0}},
    {"banned_token_ids": (2**40,)},
]


@pytest.mark.parametrize("given", HOSTILE, ids=str)
def test_what_no_step_could_run_is_rejected_before_the_queue(server, given):
    with pytest.raises(RequestError, match=next(iter(given))):
        asyncio.run(server.generate(BAD, SamplingParams(temperature=0, **given)))


@pytest.mark.parametrize("blocks", [5, (0,), (1,), (100, 100), (True,), (2.5,), "x"], ids=str)
def test_counts_of_blocks_that_make_no_cache_are_rejected(blocks):
    with pytest.raises(RequestError, match="kv_blocks"):
        AsyncLLM("preset:gpt2-tiny", max_num_seqs=2, max_model_len=64, kv_blocks=blocks)


@pytest.mark.parametrize("salt", ["\ud800", 7, None, "x" * 5000])
def test_salts_that_are_no_text_are_rejected(server, salt):
    with pytest.raises(RequestError, match="cache_salt"):
        asyncio.run(server.generate(BAD, PARAMS, cache_salt=salt))


def test_a_drafter_that_fails_costs_its_drafts(monkeypatch):
    def failing(*_):
        raise RuntimeError("injected")

    llm = AsyncLLM("preset:gpt2-tiny", max_num_seqs=2, max_model_len=128, speculate="ngram")
    wanted = [(asyncio.run(llm.generate(prompt, PARAMS)))[0].tokens for prompt in PROMPTS]
    monkeypatch.setattr(NgramDrafter, "propose", failing)
    assert [result[0].tokens for result in together(llm)] == wanted
    asyncio.run(llm.shutdown())
