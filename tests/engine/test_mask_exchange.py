"""Masks that the host makes while decode steps run: a fault of theirs ends one request or none."""

import asyncio
import threading
from dataclasses import replace

import pytest

from rooflax import SamplingParams
from rooflax.async_llm import AsyncLLM
from rooflax.errors import EngineError
from rooflax.nn.execution import ExecutionOptions
from tests.engine.test_faults import BAD, PARAMS, PROMPTS, Panic, together


@pytest.fixture(scope="module")
def server():
    """A server that runs several decode steps per dispatch, while masks are made."""
    options = ExecutionOptions(decode_steps=8)
    llm = AsyncLLM("preset:gpt2-tiny", max_num_seqs=8, max_model_len=128, options=options)
    if not llm._thread.engine.runner.masks.exchanges:
        pytest.skip("the native library was not built")
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def alone(server):
    async def run():
        return [(await server.generate(prompt, PARAMS))[0].tokens for prompt in PROMPTS]

    return asyncio.run(run())


GUIDED = SamplingParams(max_tokens=30, temperature=0, regex="[a-z ]+")


@pytest.mark.parametrize("error", [RuntimeError("injected"), Panic("injected")])
def test_a_grammar_that_fails_while_steps_run_ends_its_request(server, alone, monkeypatch, error):
    from rooflax.structured import GrammarConstraint

    look, threads = GrammarConstraint._look, set()

    def failing(constraint):
        if len(constraint._ahead) < 2:
            return look(constraint)
        threads.add(threading.current_thread().name)
        raise error

    monkeypatch.setattr(GrammarConstraint, "_look", failing)
    found = together(server, {tuple(BAD): GUIDED})
    monkeypatch.undo()
    for prompt, result, tokens in zip(PROMPTS, found, alone, strict=True):
        if prompt == BAD:
            assert isinstance(result, EngineError) and "injected" in str(result)
        else:
            assert result[0].tokens == tokens
    assert not any(server.metrics()["blocks_used"]) and not server.metrics()["num_compilations"]
    assert all(name.startswith("rooflax-masks") for name in threads) and threads


FORMS = {"one mask": GUIDED, "ends": replace(GUIDED, regex="[ab]{3}(cd)?[x-z]{2}q{5,9}")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["masks", "result"])
def test_a_step_that_fails_beside_masks_is_run_again(server, alone, monkeypatch, when, form):
    """Guides that were ahead go back: the tokens are those of a run without a fault."""
    wanted = asyncio.run(server.generate(BAD, FORMS[form]))[0].tokens
    runner, faults = server._thread.engine.runner, []

    if when == "masks":
        exchange = runner.masks._exchange
        make = exchange._make_masks

        def broken(rows, num_steps):
            if faults:
                return make(rows, num_steps)
            faults.append(num_steps)
            make(rows, min(7, num_steps))  # and then the thread is gone
            raise RuntimeError("injected")

        monkeypatch.setattr(exchange, "_make_masks", broken)
    else:
        dispatch = runner._dispatch

        def broken(call, num_steps=1, masks=None, exchange=0):
            result = dispatch(call, num_steps, masks, exchange)
            if exchange and not faults:
                faults.append(num_steps)
                raise RuntimeError("injected")
            return result

        monkeypatch.setattr(runner, "_dispatch", broken)
    found = together(server, {tuple(BAD): FORMS[form]})
    monkeypatch.undo()
    assert faults
    for prompt, result, tokens in zip(PROMPTS, found, alone, strict=True):
        assert result[0].tokens == (wanted if prompt == BAD else tokens)
    assert server.metrics()["num_compilations"] == 0
