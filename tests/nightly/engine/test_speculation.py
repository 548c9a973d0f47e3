"""Longer tests beside those of tests/engine/engine/test_speculation.py."""

import pytest

from rooflax import LLM, AsyncLLM
from rooflax.nn.execution import ExecutionOptions
from tests.engine.engine import test_speculation as beside
from tests.engine.engine.test_speculation import CODE, params

drafting = beside.drafting
plain = beside.plain
unhesitating = beside.unhesitating


@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.8, "seed": 5}],
    ids=str,
)
def test_a_model_that_is_its_own_draft_is_always_right(unhesitating, given):
    """Drafts are drawn with the noise of the tokens they stand for."""
    preset = "preset:gpt2-tiny"
    wanted = LLM(preset).generate(["abc", "abd" * 9], params(**given))
    found = LLM(preset, speculate=preset).generate(["abc", "abd" * 9], params(**given))
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    for completion in found:
        assert completion.num_accepted_tokens == completion.num_draft_tokens > 0


def test_a_draft_model_that_knows_nothing_changes_no_token(plain, unhesitating):
    drafting = LLM(speculate="preset:gpt2-tiny")
    wanted = plain.generate([CODE, "import"], params())
    found = drafting.generate([CODE, "import"], params())
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert sum(c.num_draft_tokens for c in found) > 0


async def _served(prompts, **given):
    import asyncio

    async with AsyncLLM(max_num_seqs=4, max_model_len=256, **given) as llm:
        results = await asyncio.gather(*(llm.generate(prompt, params()) for prompt in prompts))
        return [c.tokens for (c,) in results], llm.metrics(), llm.warm_up_report


@pytest.mark.parametrize(
    "speculate",
    [
        "ngram",
        "preset:gpt2-tiny",
    ],
)
def test_drafts_of_a_server_compile_nothing_after_warm_up(plain, unhesitating, speculate):
    import asyncio

    prompts = [CODE, CODE[:90], "import os", CODE + "class"]
    tokens, metrics, warm_up_report = asyncio.run(_served(prompts, speculate=speculate))
    assert tokens == [c.tokens for c in plain.generate(prompts, params())]
    assert metrics["num_draft_tokens"] > 0
    assert metrics["num_compilations"] == 0
    assert any("verify" in line.name for line in warm_up_report)


@pytest.mark.parametrize("jit", [True, False])
def test_more_blocks_than_a_step_reads_are_no_harm(plain, unhesitating, jit):
    """Room for 32 tokens, of which the next step takes one, at the edge of a bucket."""
    options = ExecutionOptions(kernels="xla", jit=jit)
    drafting = LLM(speculate="ngram", num_draft_tokens=31, max_num_seqs=1, options=options)
    ids = plain.encode(CODE * 2)[:200]
    given = params(max_tokens=70 if jit else 12, ignore_eos=True)
    assert drafting.generate([ids], given)[0].tokens == plain.generate([ids], given)[0].tokens
