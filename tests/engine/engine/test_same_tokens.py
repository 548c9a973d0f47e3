"""The same tokens, whoever else is in the batch: random loads against each request alone."""

import itertools

import jax
import numpy as np
import pytest

from rooflax import load
from rooflax.engine.compilation import count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.features.speculation import Drafter, Speculation
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import STATE, blocks_needed
from tests import goldens
from tests.marks import cases
from tests.support.engine.load import MAX_TOKENS, random_requests, run_alone, run_load

pytestmark = [pytest.mark.first, pytest.mark.oldest_jax]

FAMILIES = (
    "gpt2", "llama_gqa", "qwen2_window", "gpt_oss", "lfm2", "gemma4_text", "gemma4_text_shared",
)  # fmt: skip
CHUNKS = (16, 64, MAX_TOKENS)
SETTINGS = list(itertools.product(FAMILIES, CHUNKS, (1, 8), (True, False), (True, False)))
SLOTS = 6
DRAFT_TOKENS = 5


class Mixed(Drafter):
    """Knows what comes, and is wrong now and then; some drafts are short, some are missing."""

    def __init__(self, known):
        self.known, self.state = known, np.random.RandomState(5)

    def propose(self, sequences, num_tokens):
        drafts = []
        for sequence in sequences:
            at = sequence.num_output_tokens
            draft = self.known[sequence.request_id][at : at + self.state.randint(num_tokens + 1)]
            drafts.append([t if self.state.rand() < 0.8 else 1 for t in draft])
        return drafts


class Always(Speculation):
    """Never asks whether drafts pay."""

    def _is_worthwhile(self, rows, num_drafts):
        return True


@pytest.fixture(scope="module")
def few_programs():
    """Called before every setting: a process with too many programs runs out of memory maps."""
    calls = itertools.count(1)

    def clear_now_and_then():
        if next(calls) % 16 == 0:
            jax.clear_caches()

    return clear_now_and_then


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """name -> its model, its requests and what each gives alone."""
    found = {}

    def get(name):
        if name not in found:
            root = tmp_path_factory.mktemp(name)
            model = load(goldens.write_checkpoint(root / "m", name, goldens.committed(name)))
            requests = random_requests(FAMILIES.index(name))
            engine = small_engine(
                model, chunk=MAX_TOKENS, steps=8, cache=False, slots=1, roomy=True, kernels=None
            )
            found[name] = model, requests, run_alone(engine, requests)
        return found[name]

    return get


def small_engine(
    model, *, chunk, steps, cache, slots=SLOTS, roomy=False, kernels="xla", drafter=None
):
    """Blocks for about two and a half of the longest sequences."""
    windows = model.config.groups.windows
    rows = 1 + DRAFT_TOKENS if drafter else 1
    lengths = (MAX_TOKENS, max(chunk, steps, 1 + DRAFT_TOKENS), 16, rows)
    needed = [blocks_needed(window, *lengths) for window in windows]
    share = slots if roomy else 1.3
    num_blocks = tuple(
        1 + int((max(share, 3) if window == STATE else share) * n)
        for window, n in zip(windows, needed, strict=True)
    )
    engine = Engine(
        model,
        EngineConfig(
            options=ExecutionOptions(kernels=kernels, decode_steps=steps),
            max_num_seqs=slots,
            max_model_len=MAX_TOKENS,
            prefill_chunk=chunk,
            max_tokens_per_step=2 * chunk,
            num_blocks=num_blocks,
            prefix_caching=cache,
        ),
        drafter and Always(drafter, DRAFT_TOKENS),
    )
    assert len(engine.warm_up_all()) <= (15 if drafter else 12)
    return engine


@pytest.mark.parametrize(
    ("family", "chunk", "steps", "cache", "drafts"),
    cases(SETTINGS, default=[("qwen2_window", 16, 8, True, True)]),
)
def test_c15_a_crowded_engine_gives_what_each_request_gives_alone(
    families, few_programs, family, chunk, steps, cache, drafts
):
    few_programs()
    model, requests, alone = families(family)
    drafter = Mixed(alone) if drafts else None
    kernels = None if drafts else "xla"
    engine = small_engine(
        model, chunk=chunk, steps=steps, cache=cache, drafter=drafter, kernels=kernels
    )
    with count_compilations() as counts:
        run = run_load(engine, requests)
    assert counts.requests == 0, "something compiled after warm-up"
    for request, sequence, wanted in zip(requests, run.sequences, alone, strict=True):
        if sequence.finish_reason == "abort":
            assert request.aborts is not None
            wanted = wanted[: sequence.num_output_tokens]
        assert sequence.output_tokens == wanted, sequence.request_id
    assert engine.scheduler.num_preemptions > 0
    metrics = engine.metrics
    assert (0 < metrics.num_accepted_tokens < metrics.num_draft_tokens) == drafts
    hits = sum(s.kv.num_cached_tokens or 0 for s in run.sequences)
    if cache and engine.runner.windows == (None,):  # so few blocks seldom hold a whole window
        assert hits > 0
    assert cache or hits == 0
