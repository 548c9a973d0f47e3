"""Beams in a crowd, on an engine that is too small for it, against each request alone."""

from dataclasses import replace

import numpy as np
import pytest

from rooflax import load
from rooflax.engine.beams import BeamGroup
from rooflax.engine.compilation import count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.speculation import Drafter, Speculation
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import blocks_needed, ceil_div
from tests import goldens
from tests.engine.load import MAX_TOKENS, Request, random_requests, run_load

SLOTS, CHUNK, STEPS = 8, 16, 8


class Beams(Request):
    """A request whose sequence stands for a group of beams."""

    def sequence(self, request_id):
        members = [super(Beams, self).sequence(request_id) for _ in range(self.params.num_beams)]
        return BeamGroup(members).members[0]


def crowd():
    """Every third request is a beam search of two or three beams."""
    requests = []
    for index, request in enumerate(random_requests(7, 24)):
        if index % 3 == 1:
            params = SamplingParams(
                num_beams=2 + index % 2,
                max_tokens=8 + index,
                length_penalty=(0.0, 1.0, 2.0)[index % 2],
                early_stopping=(False, True, "never")[index % 3 - 1],
                repetition_penalty=1.2 if index % 2 else None,
            )
            request = Beams(
                request.prompt[:40], params.with_defaults({}), request.arrives, request.aborts,
                request.stop_ids,
            )  # fmt: skip
        requests.append(request)
    return requests


def engine_of(model, *, cache):
    windows = model.config.groups.windows
    needed = [blocks_needed(w, MAX_TOKENS, CHUNK, 16) for w in windows]
    shares = [1.7 if w is None else 3.1 for w in windows]  # three beams of 70 tokens fit
    engine = Engine(
        model,
        EngineConfig(
            options=ExecutionOptions(kernels="xla", decode_steps=STEPS),
            max_num_seqs=SLOTS,
            max_model_len=MAX_TOKENS,
            prefill_chunk=CHUNK,
            max_tokens_per_step=2 * CHUNK,
            num_blocks=tuple(1 + int(s * n) for s, n in zip(shares, needed, strict=True)),
            prefix_caching=cache,
        ),
    )
    assert len(engine.warm_up_all()) <= 12
    return engine


def given(sequence):
    """Tokens and score of every beam."""
    return [(m.output_tokens, m.score) for m in sequence.siblings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("llama_gqa", True),
        ("gpt_oss", False),
    ],
)
def test_beams_in_a_crowd_are_the_beams_alone(tmp_path, family, cache):
    model = load(goldens.write_checkpoint(tmp_path / "m", family, goldens.committed(family)))
    engine, requests = engine_of(model, cache=cache), crowd()
    alone = []
    for request in requests:
        run = run_load(engine, [replace(request, arrives=0, aborts=None)])
        alone.append(given(run.sequences[0]))
    assert engine.scheduler.num_preemptions == 0
    with count_compilations() as counts:
        run = run_load(engine, requests)
    assert counts.requests == 0, "something compiled after warm-up"
    preempted = 0
    for sequence, wanted in zip(run.sequences, alone, strict=True):
        assert len({m.finish_reason == "abort" for m in sequence.siblings}) == 1
        if sequence.finish_reason == "abort":
            continue
        found = given(sequence)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        if sequence.group is not None:
            preempted += sum(m.num_preemptions for m in sequence.siblings)
            np.testing.assert_allclose(
                [score for _, score in found], [score for _, score in wanted], rtol=0, atol=1e-4
            )
    assert preempted > 0, "no beam lost its blocks"
    assert sum(s.finish_reason == "abort" for s in run.sequences if s.group is not None) >= 1


@pytest.mark.parametrize("family", ["llama_gqa", "qwen3_5_text"])
def test_beams_share_no_block_that_drafts_may_be_written_into(tmp_path, family):
    """Room for drafts is reserved ahead, and every beam writes into its own."""
    model = load(goldens.write_checkpoint(tmp_path / "m", family, goldens.committed(family)))
    params = SamplingParams(num_beams=3, max_tokens=24, temperature=0).with_defaults({})
    found, ahead = [], 0
    for longest in (0, 8):
        engine = Engine(
            model,
            EngineConfig(
                options=ExecutionOptions(kernels="xla"),
                max_num_seqs=3,
                max_model_len=64,
                prefill_chunk=32,
            ),
            Speculation(Drafter(), longest),
        )
        blocks, full = engine.scheduler.blocks, model.config.groups.windows.index(None)
        for length in (7, 15):
            first = Beams(list(range(5, 5 + length)), params, 0).sequence(0)
            engine.warm_up_prefill([first])
            engine.add([first])
            while engine.has_unfinished:
                engine.step()
                assert first.error is None
                for beam in engine.scheduler.running:
                    written = ceil_div(beam.num_computed_tokens, blocks.block_size)
                    rest = beam.block_tables[full][written:]
                    assert all(blocks.pools[full].ref_count[block] == 1 for block in rest)
                    ahead += len(rest)
            found.append(given(first))
        assert not any(blocks.num_used)
    assert found[:2] == found[2:]
    assert ahead > 0, "no room was reserved ahead"
