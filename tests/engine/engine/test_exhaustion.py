"""Memory that runs out at work: one sentence, and the next request runs."""

import asyncio

import jax
import pytest

from rooflax import LLM, AsyncLLM, EngineError, SamplingParams
from rooflax.engine import exhaustion
from rooflax.engine.runner import Runner

pytestmark = pytest.mark.oldest_jax

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
SENTENCE = (
    r"^{}Memory ran out: 1.00 GiB was needed for a step and .* is free; .* in order of effect: "
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.", 1 << 30),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.50GiB.", 9 << 29),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 12.0KiB (12288B)", None),
        ("RESOURCE_EXHAUSTED: no more", None),
    ],
)
def test_the_bytes_that_an_error_names(text, wanted):
    assert exhaustion.is_exhausted(RuntimeError(text))
    assert exhaustion.needed_bytes(RuntimeError(text)) == wanted


@pytest.fixture
def exhausted_once(monkeypatch):
    """The first device call of a request finds no memory, and loses the donated cache."""
    run, calls = Runner.run, []

    def failing(self, call, num_steps):
        calls.append(call)
        if len(calls) == 1:
            for leaf in jax.tree.leaves(self.cache):
                leaf.delete()
            self.lost_state = True
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 1073741824 bytes.")
        return run(self, call, num_steps)

    monkeypatch.setattr(Runner, "run", failing)


@pytest.mark.every_jax
def test_c12_llm_survives(exhausted_once):
    llm = LLM("preset:gpt2-tiny", max_model_len=64)
    with pytest.raises(EngineError, match=SENTENCE.format("")) as caught:
        llm.generate("abc", PARAMS)
    said = str(caught.value)
    sizes = [said.index(name) for name in ("weights", "KV cache", "workspace")]
    kv_cache, weights = llm.new_engine(1, 64).kv_cache_bytes, llm.model.weights_bytes
    assert (sizes[0] < sizes[1]) == (weights > kv_cache)
    assert len(llm.generate("abc", PARAMS)[0].tokens) == 4


def test_c12_a_server_runs_the_request_again(exhausted_once):
    async def ask():
        async with AsyncLLM("preset:gpt2-tiny", max_num_seqs=2, max_model_len=64) as llm:
            return await llm.generate("abc", PARAMS)

    assert len(asyncio.run(ask())[0].tokens) == 4
