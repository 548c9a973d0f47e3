"""Layers with state: rows per sequence beside KV blocks, and snapshots for the prefix cache."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, RequestError, SamplingParams, load
from rooflax.engine.engine import Engine
from rooflax.engine.features.speculation import Drafter, Speculation
from rooflax.engine.sequence import Sequence
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.layout import STATE, STATE_GRID, num_snapshots
from rooflax.train.checks import check_trainable
from rooflax.train.config import TrainConfig
from tests import goldens
from tests.marks import cases
from tests.support.models.programs import full_logits

STATEFUL = ("lfm2", "qwen3_5_text")
SPARSE = ("qwen3_next", "qwen3_5_moe_text")
"""Whose other tests are in test_families: preempted, forked, in a batch."""
BUDGETS = {"lfm2": 400_000, "qwen3_5_text": 650_000}
"""Bytes that hold some of the layers."""
CONTEXT = 1100
GREEDY = SamplingParams(temperature=0.0, max_tokens=3).with_defaults({})


class Knowing(Drafter):
    """Drafts what comes, and something else at every third place."""

    def __init__(self, known):
        self.known = known

    def propose(self, sequences, num_tokens):
        drafts = []
        for sequence in sequences:
            at = sequence.num_output_tokens
            draft = self.known[sequence.request_id][at : at + num_tokens]
            drafts.append([1 if (at + i) % 3 == 2 else t for i, t in enumerate(draft)])
        return drafts


class Always(Speculation):
    def _is_worthwhile(self, rows, num_drafts):
        return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint of a family, with a longer context."""
    made = {}

    def get(variant):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant) / "m"
            longer = {"max_position_embeddings": CONTEXT}
            reference = goldens.committed(variant)
            made[variant] = goldens.write_checkpoint(folder, variant, reference, config=longer)
        return made[variant]

    return get


@pytest.fixture(scope="module")
def engine(checkpoint):
    """An engine of two slots, by its arguments."""
    models, made = {}, {}

    def get(variant, **changes):
        model = models.setdefault(variant, None) or load(checkpoint(variant))
        models[variant] = model
        key = variant, json.dumps(changes, sort_keys=True, default=str)
        if key not in made or "speculation" in changes:
            options = changes.pop("options", ExecutionOptions(decode_steps=4))
            sizes = {"max_num_seqs": 2, "max_model_len": CONTEXT, "prefill_chunk": 256} | changes
            speculation = sizes.pop("speculation", None)
            made[key] = Engine(model, EngineConfig(options=options, **sizes), speculation)
        return made[key]

    return get


def run(engine, prompts, params=GREEDY):
    """Every prompt at once, to its end."""
    found = [
        Sequence(index, prompt, params, params.max_tokens, frozenset())
        for index, prompt in enumerate(prompts)
    ]
    engine.warm_up_prefill(found)  # which says whether anybody wants more than the best token
    engine.add(found)
    while engine.has_unfinished:
        engine.step()
    assert not any(s.error for s in found)
    return found


def outcome(sequence):
    """Its tokens, and what it says of each of them."""
    return sequence.output_tokens, [entry.logprob for entry in sequence.sampler.logprobs]


def ids(seed, count):
    return np.random.RandomState(seed).randint(0, goldens.VOCAB, count).tolist()


@pytest.mark.parametrize(
    ("variant", "drafts"),
    cases(
        [(variant, drafts) for variant in (*STATEFUL, *SPARSE) for drafts in (False, True)],
        default=[("lfm2", False), ("qwen3_5_text", True)],
    ),
)
def test_a_hit_at_any_length_gives_the_tokens_of_a_cold_run(engine, variant, drafts):
    """Prompts that share 1 to 200 tokens with one that was run before; log-probabilities too, to
    the bit. Every length around the ends of what is kept, and every seventh."""
    params = replace(GREEDY, logprobs=0)
    first = ids(1, 260)
    near = {end + n for end in range(0, 201, STATE_GRID) for n in (-1, 0, 1, 2)}
    lengths = sorted({*range(1, 201, 7), 200, *near} - {-1, 0})
    prompts = [[*first[:n], *ids(1000 + n, 7)] for n in lengths]
    cold = engine(variant, prefix_caching=False)
    wanted = [outcome(run(cold, [prompt], params)[0]) for prompt in prompts]
    known = {0: []}
    more = {"speculation": Always(Knowing(known), 3)} if drafts else {}
    warm = engine(variant, **more)
    known[0] = run(cold, [first], params)[0].output_tokens
    run(warm, [first], params)
    for length, prompt, alone in zip(lengths, prompts, wanted, strict=True):
        known[0] = alone[0]
        (sequence,) = run(warm, [prompt], params)
        assert outcome(sequence) == alone, length
        assert sequence.kv.num_cached_tokens == length // STATE_GRID * STATE_GRID
    assert not any(warm.scheduler.blocks.num_used)
    assert (warm.metrics.num_accepted_tokens > 0) == drafts


@pytest.mark.parametrize("variant", cases((*STATEFUL, *SPARSE), nightly=SPARSE))
def test_a_prompt_that_shares_900_of_1000_tokens_computes_at_most_164(engine, variant):
    first = ids(2, 1000)
    second = [*first[:900], *ids(3, 100)]
    warm, ran = engine(variant), []
    run(warm, [first])
    calls = warm.runner.calls

    def counted(plan):
        found = calls(plan)
        ran.extend(n for call in found for s, n in zip(call.sequences, call.counts, strict=True)
                   if s.num_output_tokens == 0)  # fmt: skip
        return found

    warm.runner.calls = counted
    try:
        (sequence,) = run(warm, [second])
    finally:
        del warm.runner.calls
    assert sequence.kv.num_cached_tokens == 896
    assert sum(ran) == 1000 - 896 <= 164
    cold = engine(variant, prefix_caching=False)
    assert sequence.output_tokens == run(cold, [second])[0].output_tokens


@pytest.mark.parametrize("variant", cases((*STATEFUL, *SPARSE), nightly=SPARSE))
def test_an_answer_is_part_of_the_next_prompt(engine, variant):
    """States of generated tokens are kept too."""
    long = SamplingParams(temperature=0.0, max_tokens=100).with_defaults({})
    warm, prompt = engine(variant), ids(4, 50)
    (turn,) = run(warm, [prompt], long)
    (following,) = run(warm, [[*turn.tokens, *ids(5, 9)]])
    assert following.kv.num_cached_tokens == 128
    cold = engine(variant, prefix_caching=False)
    assert following.output_tokens == run(cold, [following.prompt_tokens])[0].output_tokens


@pytest.mark.parametrize("variant", cases((*STATEFUL, *SPARSE), default=["qwen3_5_text"]))
def test_snapshots_go_with_their_blocks_and_stay_within_their_rows(engine, variant):
    """A pool of 40 blocks and 6 rows; whatever is found is true."""
    groups = engine(variant).model.config.groups
    num_blocks = tuple(6 if w == STATE else 40 for w in groups.windows)
    small = engine(variant, num_blocks=num_blocks, max_model_len=300)
    cold = engine(variant, prefix_caching=False)
    state, hits = small.scheduler.blocks.pools[groups.state], 0
    full = small.scheduler.blocks.pools[groups.windows.index(None)]
    for round_ in range(12):
        shared = ids(round_ % 4, 200)
        prompts = [[*shared[: 60 + 40 * i + round_], *ids(100 + round_, 9)] for i in range(3)]
        found = run(small, prompts)
        hits += sum(s.kv.num_cached_tokens or 0 for s in found)
        for sequence, prompt in zip(found, prompts, strict=True):
            assert sequence.output_tokens == run(cold, [prompt])[0].output_tokens
        assert state._block_of.keys() <= full._block_of.keys()
        assert len(state._block_of) < 6
        assert len(state.free) == 5 and len(set(state.free)) == 5
    assert hits > 0


def test_the_budget_of_snapshots_is_a_rule():
    assert num_snapshots(0, 16, 4096, 16) == 0
    assert num_snapshots(1000, 2, 1100, 16) == 2 * 17
    assert num_snapshots(20 << 20, 16, 4096, 16) == (512 << 20) // (20 << 20)


@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    cases(
        [(variant, kv_dtype) for variant in STATEFUL for kv_dtype in ("bfloat16", "int8")],
        default=[("lfm2", "int8"), ("qwen3_5_text", "bfloat16")],
    ),
)
def test_states_are_float32_whatever_the_cache(engine, variant, kv_dtype):
    small = engine(variant, kv_dtype=kv_dtype)
    groups = small.model.config.groups
    pools = [k for k, g in zip(small.runner.cache.k, groups.of_layer, strict=True)
             if g == groups.state]  # fmt: skip
    assert pools and all(array.dtype == jnp.float32 for states in pools for array in states)
    run(small, [ids(6, 40)])


SETTINGS = {
    "scan": {"options": ExecutionOptions(layers="scan")},
    "no cache": {"options": ExecutionOptions(use_cache=False)},
    "no jit": {"options": ExecutionOptions(jit=False)},
    "reference": {"options": ExecutionOptions(kernels="reference")},
    "float16": {"kv_dtype": "float16"},
    "budget": {"weights_budget": "some"},
}


@pytest.mark.parametrize(
    ("variant", "name"),
    cases(
        [(variant, name) for variant in STATEFUL for name in SETTINGS],
        default=[
            ("lfm2", "reference"),
            ("lfm2", "float16"),
            ("qwen3_5_text", "scan"),
            ("qwen3_5_text", "no cache"),
            ("qwen3_5_text", "budget"),
        ],
    ),
)
def test_settings_change_no_token(checkpoint, variant, name):
    settings = SETTINGS[name]
    wanted = goldens.committed(variant).greedy[:, :12].tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    if "weights_budget" in settings:
        settings = {"weights_budget": BUDGETS[variant]}
    llm = LLM(checkpoint(variant), **settings)
    assert (llm.offload_plan is not None) == ("weights_budget" in settings)
    found = llm.generate(goldens.prompts(), greedy)
    assert [list(c.tokens) for c in found] == wanted


@pytest.mark.parametrize("variant", cases(STATEFUL, default=["qwen3_5_text"]))
@pytest.mark.parametrize("kernels", cases([None, "xla"], nightly=["xla"]))
def test_a_constraint_goes_on_from_the_state_of_the_token_that_was_taken(
    checkpoint, variant, kernels
):
    """Decode steps that ran with an old mask are not taken; states would not go back with them."""
    form = SamplingParams(temperature=0.0, max_tokens=24, regex="[a-c]{3}(x|yy)[0-9]{2,9}z[d-f]+")
    one, many = (
        LLM(checkpoint(variant), options=ExecutionOptions(decode_steps=n, kernels=kernels))
        for n in (1, 8)
    )
    prompts = goldens.prompts()
    wanted = [one.generate([prompt], form)[0].tokens for prompt in prompts]
    assert [c.tokens for c in many.generate(prompts, form)] == wanted


@pytest.mark.parametrize("variant", cases(STATEFUL, default=["lfm2"]))
def test_scores_are_those_of_the_whole(checkpoint, variant):
    llm = LLM(checkpoint(variant))
    prompts = [ids(7, 90), ids(8, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    for prompt, found in zip(prompts, llm.generate(prompts, params), strict=True):
        logits = np.asarray(full_logits(llm.model, jnp.asarray([prompt], jnp.int32)))[0]
        logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        wanted = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
        scores = [entry.logprob for entry in found.prompt_logprobs]
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-4)
        np.testing.assert_allclose(llm.score(prompt)[0], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", STATEFUL)
def test_training_is_rejected_by_name(checkpoint, variant):
    with pytest.raises(RequestError, match=f"{variant}, whose layers with state"):
        check_trainable(load(checkpoint(variant)), TrainConfig(steps=1))


@pytest.mark.parametrize(
    "variant", cases([*STATEFUL, *SPARSE, "qwen2_moe"], default=["qwen3_5_moe_text"])
)
def test_log_probabilities_are_the_same_whatever_the_chunks_hits_and_drafts(engine, variant):
    """To the bit: on CPU every sum of a token has one order."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0).with_defaults({})
    prompts = [ids(20, 150), ids(21, 33), ids(20, 131)]

    def check(sequences):
        assert [s.output_tokens for s in sequences] == list(known.values())
        for sequence, other in zip(sequences, alone, strict=True):
            found, wanted = ([e.logprob for e in s.sampler.logprobs] for s in (sequence, other))
            np.testing.assert_array_equal(found, wanted)

    cold = engine(variant, prefix_caching=False)
    alone = [run(cold, [prompt], params)[0] for prompt in prompts]
    assert all(len(s.sampler.logprobs) == 20 for s in alone)
    known = {i: s.output_tokens for i, s in enumerate(alone)}
    check(run(engine(variant, prefix_caching=False, prefill_chunk=16), prompts, params))
    drafted = engine(variant, speculation=Always(Knowing(known), 3))
    for _ in range(2):  # the second time with hits
        check(run(drafted, prompts, params))
    assert drafted.metrics.num_accepted_tokens > 0
