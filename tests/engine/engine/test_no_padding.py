"""Native kernels compute the tokens that were asked for and no more, whatever the bucket."""

import ctypes

import numpy as np
import pytest

from rooflax import LLM
from rooflax.engine.engine import Engine
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence
from rooflax.nn.engine_config import EngineConfig
from rooflax.ops import native

pytestmark = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
MATMULS_PER_LAYER = 4
PARAMS = SamplingParams(temperature=0.0).with_defaults({})


def computed() -> np.ndarray:
    """Rows of matmuls, queries of attention, tokens written to caches, rows sampled."""
    counts = (ctypes.c_int64 * 4)()
    native.load().rooflax_computed(counts)
    return np.array(counts[:])


@pytest.fixture(scope="module")
def engine():
    llm = LLM("preset:gpt2-tiny", max_num_seqs=4)
    engine = Engine(
        llm.model,
        EngineConfig(options=llm.options, max_num_seqs=4, max_model_len=1024, prefix_caching=False),
    )
    engine.warm_up_all()
    return engine


def run(engine, lengths, new_tokens=1):
    """What the kernels computed for prompts of these lengths at once, per layer where it is so."""
    state, layers = np.random.RandomState(len(lengths)), engine.model.config.num_layers
    prompts = [state.randint(0, 999, n).tolist() for n in lengths]
    engine.add([Sequence(i, p, PARAMS, new_tokens, frozenset()) for i, p in enumerate(prompts)])
    before = computed()
    while engine.has_unfinished:
        engine.step()
    matmuls, queries, written, sampled = (computed() - before).tolist()
    return (
        (matmuls - sampled) / (MATMULS_PER_LAYER * layers),
        queries / layers,
        written / layers / 2,
        sampled,
    )


@pytest.mark.parametrize(
    "lengths",
    [(n,) for n in (1, 2, 17, 64, 65, 100, 511, 512, 513, 700)] + [(3, 65, 1, 130), (90,) * 7],
    ids=str,
)
def test_the_kernels_compute_the_tokens_of_the_prompts(engine, lengths):
    assert run(engine, lengths) == (*(sum(lengths),) * 3, len(lengths))


def test_decode_steps_compute_a_token_for_every_sequence_that_runs(engine):
    """Three of four slots, with other prompts' chunks beside them at first."""
    lengths, new_tokens = (40, 3, 600), 6
    total = sum(lengths) + len(lengths) * (new_tokens - 1)
    assert run(engine, lengths, new_tokens) == (*(total,) * 3, len(lengths) * new_tokens)
