"""Longer tests beside those of tests/engine/test_structured.py."""

import asyncio

import jax
import pytest

from rooflax import LLM, AsyncLLM, EngineError, ExecutionOptions, RequestError, SamplingParams
from rooflax.engine.compilation import count_compilations
from rooflax.engine.features.grammar import constrain
from rooflax.engine.sequence import Sequence
from rooflax.structured import Grammars
from tests import goldens
from tests.engine import test_structured as beside
from tests.engine.engine.test_same_tokens import small_engine
from tests.engine.test_structured import FORMS, PROMPTS, fits, params
from tests.gguf_cases import gguf
from tests.support.engine.load import random_requests, run_alone, run_load

llm = beside.llm


def test_two_devices_give_what_one_gives(tmp_path):
    """The vocabulary of 263 does not divide by two."""
    name = "llama_bias"
    folder = goldens.write_checkpoint(tmp_path / "m", name, goldens.committed(name))
    given = params("regex", temperature=1.5, seed=8)
    mesh = jax.make_mesh((2,), ("tensor",))
    one, two = (LLM(folder, mesh=where).generate(PROMPTS, given) for where in (None, mesh))
    assert [c.tokens for c in one] == [c.tokens for c in two]
    assert all(fits("regex", completion.text) for completion in two)


def test_a_sentencepiece_vocabulary_out_of_a_gguf_file():
    llm = LLM(gguf("llama2", "f32"))
    for kind in FORMS:
        given = params(kind, temperature=1.5, seed=1, n=2, max_tokens=90)
        for completion in llm.generate("the", given):
            assert completion.finish_reason == "stop" and fits(kind, completion.text)


def constrained_requests(grammars):
    """A random load, two thirds of it with a form."""
    names = list(FORMS)
    for index, request in enumerate(random_requests(6, 18)):
        kind = names[index % 3] if index % 3 != 1 else None
        sampled = {"temperature": 1.4, "seed": index} if index % 2 else {"temperature": 0.0}
        form = {kind: FORMS[kind], "frequency_penalty": 0.1 * (index % 4)} if kind else {}
        given = SamplingParams(max_tokens=60 if kind else 20, **sampled, **form).with_defaults({})
        yield Constrained(grammars, request.prompt, given, request.arrives, request.aborts)


class Constrained:
    def __init__(self, grammars, prompt, params, arrives, aborts):
        self.grammars, self.prompt, self.params = grammars, prompt, params
        self.arrives, self.aborts = arrives, aborts

    def sequence(self, request_id):
        constraint = self.grammars.constraint(self.params, frozenset())
        tokens = self.params.max_tokens
        sequence = Sequence(request_id, self.prompt, self.params, tokens, frozenset())
        constrain(sequence, constraint)
        return sequence


@pytest.mark.parametrize(("chunk", "cache"), [(16, True), (64, False)])
def test_a_crowded_engine_gives_what_each_request_gives_alone(llm, chunk, cache):
    requests = list(constrained_requests(Grammars(llm.tokenizer, goldens.VOCAB, ())))
    lonely = small_engine(llm.model, chunk=131, steps=8, cache=False, slots=1, roomy=True)
    alone = run_alone(lonely, requests)
    crowd = small_engine(llm.model, chunk=chunk, steps=8, cache=cache)
    with count_compilations() as counts:
        run = run_load(crowd, requests)
    assert counts.requests == 0, "something compiled after warm-up"
    assert crowd.scheduler.num_preemptions > 0
    assert any(
        s.schedule.num_preemptions and s.sampler.constraint is not None for s in run.sequences
    )
    for sequence, wanted in zip(run.sequences, alone, strict=True):
        if sequence.finish_reason == "abort":
            wanted = wanted[: sequence.num_output_tokens]
        assert sequence.output_tokens == wanted
        form = sequence.params.structured_output
        if form is not None and sequence.finish_reason == "stop":
            assert fits(form[0], llm.tokenizer.decode(sequence.output_tokens))
    assert sum(s.finish_reason == "stop" for s in run.sequences) >= 8


def test_many_callers_at_once(folder, llm):
    server = AsyncLLM(folder, max_num_seqs=4, options=ExecutionOptions(decode_steps=4))
    wanted = [
        (prompt, params(kind, temperature=temperature, seed=9))
        for prompt in PROMPTS
        for kind in FORMS
        for temperature in (0.0, 1.5)
    ]
    wrong = params("regex", allowed_token_ids=llm.encode("d"))

    async def all_at_once():
        asked = [server.generate(prompt, given) for prompt, given in wanted]
        found = await asyncio.gather(*asked, return_exceptions=False)
        with pytest.raises(EngineError, match="No token was left"):
            await server.generate(PROMPTS[0], wrong)
        with pytest.raises(RequestError, match="regex cannot be used: unclosed group"):
            await server.generate(PROMPTS[0], SamplingParams(regex="(a"))
        stream = server.stream(PROMPTS[0], wanted[0][1])
        await anext(stream)
        await stream.aclose()
        return found

    with count_compilations() as counts:
        found = asyncio.run(all_at_once())
    assert counts.requests == 0
    assert len(server.warm_up_report) <= 12
    for (prompt, given), (completion,) in zip(wanted, found, strict=True):
        alone = llm.generate(prompt, given)[0]
        assert (completion.tokens, completion.text) == (alone.tokens, alone.text)
        assert fits(given.structured_output[0], completion.text)
    asyncio.run(server.shutdown())
