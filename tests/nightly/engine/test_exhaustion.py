"""Longer tests beside those of tests/engine/engine/test_exhaustion.py."""

import asyncio

import jax
import pytest

from rooflax import AsyncLLM, EngineError
from rooflax.engine.runner import Runner
from tests.engine.engine.test_exhaustion import PARAMS, SENTENCE


def test_c12_a_server_says_why_if_that_fails_too_and_goes_on(monkeypatch):
    run, calls = Runner.run, []

    def failing(self, call, num_steps):
        calls.append(call)
        if len(calls) <= 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 1073741824 bytes.")
        return run(self, call, num_steps)

    monkeypatch.setattr(Runner, "run", failing)

    async def ask():
        async with AsyncLLM("preset:gpt2-tiny", max_num_seqs=2, max_model_len=64) as llm:
            with pytest.raises(EngineError, match=SENTENCE.format("")):
                await llm.generate("abc", PARAMS)
            return await llm.generate("abc", PARAMS)

    assert len(asyncio.run(ask())[0].tokens) == 4
