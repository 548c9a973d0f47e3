"""Of every family: the same tokens in a batch, after a hit, after losing its blocks, and forked."""

import itertools

import jax
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams
from rooflax.engine.block_manager import BlockManager
from rooflax.engine.engine import Engine
from rooflax.models.registry import families, read_config
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.layout import STATE, STATE_GRID
from rooflax.ops.accelerator import block_size
from tests import encoder_cases, goldens
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

VARIANTS = (
    *goldens.by_family(
        qwen2="qwen2_window", qwen3="qwen3_window", smollm3="smollm3_window",
        seed_oss="seed_oss_bias", qwen3_moe="qwen3_moe_dense", phi3="phi3_long",
    ).values(),
    "gemma4_text_moe", "gemma4_text_shared",
)  # fmt: skip
"""A checkpoint of each family, and of Gemma 4's three kinds."""
KINDS = (
    "gpt2", "smollm3_window", "gpt_oss", "glm4_moe", "lfm2", "qwen3_5_text", "gemma4_text_shared",
    "deepseek_v3",
)  # fmt: skip
"""By default: learned positions, windows, sinks and experts, a shared expert, convolutions, delta
rules, shared caches and latent ones. A batch of every family equals transformers in test_parity."""
WRAPPERS = {
    "gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text",
}  # fmt: skip
"""Families that read another family's config in their text_config, and give the same layers."""

SLOTS, CHUNK, STEPS, LONGEST = 6, 12, 8, 128
NEW_TOKENS, NUM_SAMPLES, NUM_BEAMS, BEAM_TOKENS = 24, 3, 3, 6
BLOCKS = {None: 13, STATE: 11, "window": 10}
"""Of each group's pool, by its window: room for the first three prompts, or for three beams."""
FEW_BLOCKS = {None: 9, STATE: 8, "window": 7}
"""Too few for all prompts that are admitted."""
TOLERANCE = 1e-4


def ids(seed, count):
    return np.random.RandomState(seed).randint(0, goldens.VOCAB, count).tolist()


PROMPTS = [ids(seed, count) for seed, count in enumerate((5, 17, 70, 75, 33, 50))]
LONG, BEGUN = PROMPTS[2], PROMPTS[4]
"""One of which a state is kept, and one that ends inside a block."""


class Family:
    """A tiny checkpoint on an engine. Sequences of the same salt share blocks."""

    def __init__(self, folder):
        llm = LLM(folder, options=ExecutionOptions(decode_steps=STEPS))
        self.samples, self.windows = llm.processor.samples, llm.model.config.groups.windows
        self.engine = Engine(
            llm.model,
            EngineConfig(
                options=llm.options,
                max_num_seqs=SLOTS,
                max_model_len=LONGEST,
                kv_dtype=llm.plan.kv_dtype,
                prefill_chunk=CHUNK,
                max_tokens_per_step=CHUNK,
                num_blocks=self.num_blocks(BLOCKS),
            ),
        )
        self.salts = map(str, itertools.count())

    def num_blocks(self, given):
        return tuple(given.get(window, given["window"]) for window in self.windows)

    def start_again(self, given, *, prefix_caching=True):
        """With nothing cached, and only so many blocks."""
        blocks = self.num_blocks(given)
        blocks = BlockManager(self.windows, blocks, block_size(), prefix_caching=prefix_caching)
        self.engine.scheduler.forget_blocks(blocks)

    def sequences(self, prompt, salt=None, **given):
        """Of a request: its samples, or its beams."""
        asked = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
        salt = next(self.salts) if salt is None else salt
        return [s.sequence for s in self.samples(0, prompt, SamplingParams(**asked | given), salt)]

    def run(self, sequences, watch=lambda: None):
        """All together, to their ends; how often one of them lost its blocks."""
        engine = self.engine
        before = engine.scheduler.num_preemptions
        engine.warm_up_prefill(sequences)
        engine.add(sequences)
        while engine.has_unfinished:
            engine.step()
            watch()
        assert not any(s.error for s in sequences) and not any(engine.scheduler.blocks.num_used)
        return engine.scheduler.num_preemptions - before

    def cold(self, prompt, sample=0, **given):
        """One sample by itself, for which nothing is cached."""
        sequence = self.sequences(prompt, **given)[sample]
        assert self.run([sequence]) == sequence.kv.num_cached_tokens == 0
        return sequence


@pytest.fixture(scope="module", params=cases(VARIANTS, default=KINDS))
def family(request, tmp_path_factory):
    variant = request.param
    folder = tmp_path_factory.mktemp(variant) / "m"
    yield Family(goldens.write_checkpoint(folder, variant, goldens.committed(variant)))
    jax.clear_caches()


@pytest.fixture(scope="module")
def alone(family):
    """What each prompt gives alone."""
    return [family.cold(prompt) for prompt in PROMPTS]


def assert_same(sequences, wanted):
    """The same tokens, with the same log-probabilities."""
    for found, other in zip(sequences, wanted, strict=True):
        assert found.output_tokens == other.output_tokens
        logprobs = [[entry.logprob for entry in s.sampler.logprobs] for s in (found, other)]
        np.testing.assert_allclose(*logprobs, rtol=0, atol=TOLERANCE)


def test_a_batch_of_unequal_lengths_gives_what_each_gives_alone(family, alone):
    few, running = [family.sequences(prompt)[0] for prompt in PROMPTS[:3]], []
    assert family.run(few, lambda: running.append(len(family.engine.scheduler.running))) == 0
    assert max(running) == 3
    assert_same(few, alone[:3])


def test_a_hit_gives_what_a_cold_run_gives(family, alone):
    (first,) = family.sequences(LONG)
    family.run([first])
    other = [*LONG[: STATE_GRID + 2], *ids(20, 9)]
    for prompt, wanted in ((LONG, alone[2]), (other, family.cold(other))):
        (hit,) = family.sequences(prompt, first.kv.cache_salt)
        family.run([hit])
        assert hit.kv.num_cached_tokens == STATE_GRID
        assert_same([hit], [wanted])


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_who_loses_its_blocks_and_is_computed_again_gives_the_same(family, alone, prefix_caching):
    crowd = [family.sequences(prompt)[0] for prompt in PROMPTS]
    family.start_again(FEW_BLOCKS, prefix_caching=prefix_caching)
    before = family.engine.metrics.step_tokens.total
    num_preemptions = family.run(crowd)
    family.start_again(BLOCKS)
    assert num_preemptions == sum(s.schedule.num_preemptions for s in crowd) > 0
    computed = family.engine.metrics.step_tokens.total - before
    assert computed > sum(s.num_tokens - 1 for s in crowd), "nothing was computed again"
    assert_same(crowd, alone)


def test_samples_that_share_a_prompt_are_those_of_requests_apart(family):
    draws = {"temperature": 1.0, "seed": 7, "n": NUM_SAMPLES}
    apart = [family.cold(LONG, sample, **draws) for sample in range(NUM_SAMPLES)]
    together, owners = family.sequences(LONG, **draws), []
    pools = family.engine.scheduler.blocks.pools
    family.run(together, lambda: owners.append(max(max(pool.ref_count) for pool in pools)))
    assert [s.kv.num_cached_tokens for s in together] == [0, STATE_GRID, STATE_GRID]
    assert max(owners) > 1
    assert_same(together, apart)
    assert len({tuple(s.output_tokens) for s in together}) == NUM_SAMPLES


def search(family):
    """Beams with their scores, where each step of each beam is a request of its own."""
    beams = [(0.0, [])]
    for _ in range(BEAM_TOKENS):
        found = []
        for score, output in beams:
            sequence = family.cold([*BEGUN, *output], max_tokens=1, logprobs=NUM_BEAMS)
            best = sequence.sampler.logprobs[0].top
            found += [(score + logprob, [*output, token]) for token, logprob in best]
        beams = sorted(found, reverse=True)[:NUM_BEAMS]
    return beams


def test_beams_are_those_of_requests_apart(family, monkeypatch):
    """A beam goes on from a copy of the block, and the state, of the one that it continues."""
    wanted, engine, forks, copied = search(family), family.engine, [], []
    fork, copy = engine.scheduler.fork, engine.runner.copy
    monkeypatch.setattr(engine.scheduler, "fork", lambda *who: (forks.append(who), fork(*who)))
    monkeypatch.setattr(engine.runner, "copy", lambda made: (copied.extend(made), copy(made)))
    beams = family.sequences(
        BEGUN, num_beams=NUM_BEAMS, n=NUM_BEAMS, max_tokens=BEAM_TOKENS, temperature=None,
        logprobs=None,
    )  # fmt: skip
    assert family.run(beams) == 0
    assert len(forks) >= NUM_BEAMS and {c.group for c in copied} == set(range(len(family.windows)))
    assert [s.output_tokens for s in beams] == [output for _, output in wanted]
    scores = [score / BEAM_TOKENS for score, _ in wanted]
    found = [state.completion_fields()["score"] for s in beams for state in s.features.values()]
    np.testing.assert_allclose(found, scores, rtol=0, atol=TOLERANCE)


@pytest.mark.every_jax
def test_every_family_is_here():
    """But those that wrap the text model of one that is."""
    raws = {goldens.VARIANTS[v]["model_type"]: goldens.VARIANTS[v] for v in VARIANTS}
    assert not raws.keys() & WRAPPERS.keys()
    assert raws.keys() | WRAPPERS.keys() == set(families()) - encoder_cases.FAMILIES
    for name, text in WRAPPERS.items():
        whole = {"model_type": name, "text_config": raws[text]}
        assert read_config(whole)[1] == read_config(raws[text])[1]
