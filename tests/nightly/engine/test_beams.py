"""Longer tests beside those of tests/engine/engine/test_beams.py."""

from dataclasses import replace

import numpy as np
import pytest

from rooflax import load
from rooflax.engine.compilation import count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.features.beams import Beam
from rooflax.engine.sampling_params import SamplingParams
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import blocks_needed
from tests import goldens
from tests.engine.engine.test_beams import Beams, given
from tests.support.engine.load import MAX_TOKENS, random_requests, run_load

SLOTS, CHUNK, STEPS = 8, 16, 8


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
        assert len({m.finish_reason == "abort" for m in sequence.schedule.siblings}) == 1
        if sequence.finish_reason == "abort":
            continue
        found = given(sequence)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        if Beam.of(sequence) is not None:
            preempted += sum(m.schedule.num_preemptions for m in sequence.schedule.siblings)
            np.testing.assert_allclose(
                [score for _, score in found], [score for _, score in wanted], rtol=0, atol=1e-4
            )
    assert preempted > 0, "no beam lost its blocks"
    assert sum(s.finish_reason == "abort" for s in run.sequences if Beam.of(s) is not None) >= 1
