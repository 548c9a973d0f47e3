"""The sampler against NumPy, against transformers' processors, and against chance itself."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.fields.sampling import MAX_LOGPROBS
from rooflax.ops import sampling as lib
from rooflax.ops import sampling_columns
from rooflax.ops.native import is_ready
from rooflax.ops.sampling import NUM_CANDIDATES, Sampling, TokenCounts, gumbel, sample
from tests import goldens
from tests.marks import cases
from tests.support.ops.cases import normal, rng

pytestmark = pytest.mark.oldest_jax

VOCAB = 317
assert VOCAB > NUM_CANDIDATES

DEFAULTS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "sample_index": 0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "num_logprobs": -1, "min_position": 0, "scores_adjusted": 0, "is_masked": 0,
}  # fmt: skip
DTYPES = {
    "top_k": "int32", "num_logprobs": "int32", "min_position": "int32", "scores_adjusted": "int32",
    "is_masked": "int32",
    "seed": "uint32", "sample_index": "uint32",
}  # fmt: skip


def settings(rows, bias=None, allowed=(), stop=(), **values):
    """Sampling of `rows` rows; a value is for all rows, a list has one for each."""
    arrays = {}
    for name, default in DEFAULTS.items():
        value = np.broadcast_to(np.asarray(values.pop(name, default)), (rows,))
        arrays[name] = jnp.asarray(value.astype(DTYPES.get(name, "float32")))
    assert not values
    ids, added = np.zeros((rows, 4), np.int32), np.zeros((rows, 4), np.float32)
    for column, (token, value) in enumerate((bias or {}).items()):
        ids[:, column], added[:, column] = token, value
    limits = [np.full((rows, 4), sampling_columns.NO_ID, np.int32) for _ in range(2)]
    for columns, given in zip(limits, (allowed, stop), strict=True):
        columns[:, : len(given)] = list(given)
    return Sampling(
        **arrays,
        bias_ids=jnp.asarray(ids),
        bias_values=jnp.asarray(added),
        allowed_ids=jnp.asarray(limits[0]),
        stop_ids=jnp.asarray(limits[1]),
    )


def params_of(given, slots, num_slots):
    """The rows of all slots."""
    params = sampling_columns.empty(num_slots)
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    rows = {name: np.asarray(values).tolist() for name, values in fields.items()}
    for row, slot in enumerate(slots):
        wanted = {name: values[row] for name, values in rows.items()}
        pairs = zip(wanted["bias_ids"], wanted["bias_values"], strict=True)
        bias = {token: value for token, value in pairs if value != 0}
        lists = wanted["allowed_ids"], wanted["stop_ids"]
        sampling_columns.write(params[slot], wanted, bias, *lists)
    return jnp.asarray(params)


@pytest.fixture(
    autouse=True,
    params=[
        "reference",
        pytest.param(
            "native",
            marks=pytest.mark.skipif(not is_ready(), reason="the native library was not built"),
        ),
    ],
)
def implementation(request):
    """Every test is of both, unless it says otherwise."""
    CHOSEN["implementation"] = request.param
    return request.param


CHOSEN: dict[str, str] = {}
REFERENCE = pytest.mark.parametrize("implementation", ["reference"], indirect=True)


adjust, keep, noise_of = jax.jit(lib._adjust), jax.jit(lib._keep), jax.jit(gumbel)


def no_counts(rows, vocab=VOCAB):
    shape = (rows + 1, vocab)
    return TokenCounts(jnp.asarray(np.zeros(shape, bool)), jnp.asarray(np.zeros(shape, np.int32)))


@functools.cache
def compiled(implementation):
    run = functools.partial(sample, implementation=implementation)
    return jax.jit(run, static_argnames="greedy")


def arguments(logits, given, positions=None, counts=None, slots=None, masks=None, pending=None):
    """All of `sample`; by default a row's slot and position are its number."""
    rows, vocab = logits.shape
    slots = np.arange(rows) if slots is None else np.asarray(slots)
    counts = no_counts(rows, vocab) if counts is None else counts
    num_slots = len(counts.generated)
    if masks is not None:
        masks = jnp.asarray(np.pad(masks, ((0, num_slots - len(masks)), (0, 0))))
    positions = np.arange(rows) if positions is None else np.asarray(positions)
    named = {} if pending is None else {"pending": jnp.asarray(pending, jnp.int32)}
    return (
        jnp.asarray(logits), params_of(given, slots, num_slots), jnp.asarray(positions, jnp.int32),
        counts, jnp.asarray(slots, jnp.int32), masks,
    ), named  # fmt: skip


def draw(*given, greedy=False, **more):
    values, named = arguments(*given, **more)
    return jax.device_get(compiled(CHOSEN["implementation"])(*values, greedy=greedy, **named))


def kept_by_hand(logits, temperature, top_k, top_p, min_p):
    """Ids that survive, in transformers' order: temperature, top-k, top-p, min-p; float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    if top_k:
        order = order[:top_k]
    probabilities = np.exp(scaled[order] - scaled[order].max())
    probabilities /= probabilities.sum()
    before = np.concatenate([[0], np.cumsum(probabilities)[:-1]])
    keep = (before < top_p) & (probabilities >= min_p * probabilities[0])
    keep[0] = True
    return order[keep], scaled[order[keep]]


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": NUM_CANDIDATES},
    {"top_k": NUM_CANDIDATES + 1},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.9999, "temperature": 5.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-7, "temperature": 5.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 300, "top_p": 0.99, "temperature": 4.0},
]


@pytest.mark.every_jax
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_a_draw_is_the_argmax_of_what_numpy_keeps_plus_the_noise(given):
    """64 rows; the noise itself is tested below."""
    rows = 64
    logits = normal(rows, VOCAB) * 2
    seeds = np.arange(rows) + 100
    tokens = np.asarray(draw(logits, settings(rows, seed=seeds, **given)).tokens)
    full = DEFAULTS | given
    ids = np.tile(np.arange(VOCAB, dtype=np.int32), (rows, 1))
    noise = np.asarray(
        noise_of(
            jnp.asarray(seeds, jnp.uint32),
            jnp.zeros(rows, jnp.uint32),
            jnp.arange(rows, dtype=jnp.int32),
            jnp.asarray(ids),
        )
    )
    for row in range(rows):
        kept, scaled = kept_by_hand(
            logits[row], full["temperature"], full["top_k"], full["top_p"], full["min_p"]
        )
        assert tokens[row] == kept[np.argmax(scaled + noise[row, kept])]


def kept_by_us(logits, given):
    """The set that `_keep` lets through, by running the sorted path itself."""
    scaled = jnp.asarray(logits / given["temperature"])
    order = np.asarray(jnp.argsort(-scaled, axis=-1, stable=True))
    ordered = jnp.take_along_axis(scaled, jnp.asarray(order), axis=-1)
    total = lib._total(scaled, ordered[:, :1])
    kept = np.asarray(keep(ordered, total, settings(len(logits), **given)))
    return [set(order[row][kept[row]].tolist()) for row in range(len(logits))]


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("given", FILTERS, ids=str)
@REFERENCE
def test_what_is_kept_equals_transformers_processors(given):
    import torch
    from transformers.generation import logits_process as hf

    full = DEFAULTS | given
    logits = normal(9, VOCAB, seed=3) * 2
    scores = torch.tensor(logits)
    chain = [hf.TemperatureLogitsWarper(float(full["temperature"]))]
    if full["top_k"]:
        chain.append(hf.TopKLogitsWarper(full["top_k"]))
    if full["top_p"] < 1:
        chain.append(hf.TopPLogitsWarper(full["top_p"]))
    if full["min_p"] > 0:
        chain.append(hf.MinPLogitsWarper(full["min_p"]))
    for processor in chain:
        scores = processor(None, scores)
    kept = [set(torch.nonzero(torch.isfinite(row))[:, 0].tolist()) for row in scores]
    assert kept_by_us(logits, full) == kept


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [5, 9]] = 2
    logits[2, VOCAB - 1] = 1
    tokens = draw(logits, settings(3, temperature=0.0)).tokens
    assert tokens.tolist() == [0, 5, VOCAB - 1]
    assert tokens.dtype == jnp.int32


def test_greedy_rows_are_not_touched_by_sampled_neighbours():
    logits = normal(6, VOCAB)
    temperature = [0.0, 1.0, 0.0, 9.0, 0.0, 0.5]
    mixed = np.asarray(
        draw(logits, settings(6, temperature=temperature, top_p=[0.9, 1, 0.1, 1, 1, 0.5])).tokens
    )
    alone = np.asarray(draw(logits, settings(6, temperature=0.0)).tokens)
    assert mixed[::2].tolist() == alone[::2].tolist() == logits.argmax(1)[::2].tolist()


def test_the_same_seed_index_and_position_draw_the_same_token_in_any_row():
    """Also next to rows that need the full sort, and in a batch of another size."""
    logits = np.tile(normal(1, VOCAB), (8, 1))
    given = {"seed": 7, "sample_index": 3, "temperature": 2.0, "top_p": 0.6}
    alone = int(draw(logits[:1], settings(1, **given), [11]).tokens[0])
    together = draw(logits, settings(8, **given), [11] * 8, slots=[3, 1, 4, 0, 5, 7, 6, 2]).tokens
    assert together.tolist() == [alone] * 8
    mixed = {name: [value] * 8 for name, value in given.items()}
    mixed["top_p"] = [0.6] + [0.99999] * 7
    mixed["seed"] = [7, *range(7)]
    assert int(draw(logits, settings(8, **mixed), [11] * 8).tokens[0]) == alone


@pytest.mark.parametrize("field", ["seed", "sample_index", "position"])
def test_another_seed_index_or_position_draws_anew(field):
    rows = 64
    logits = np.tile(normal(1, VOCAB), (rows, 1))
    different = np.arange(rows)
    given = {"temperature": 3.0} | ({} if field == "position" else {field: different})
    positions = different if field == "position" else np.zeros(rows)
    tokens = draw(logits, settings(rows, **given), positions).tokens.tolist()
    assert len(set(tokens)) > rows / 2


@REFERENCE
def test_the_path_of_candidates_and_the_full_sort_agree_exactly(monkeypatch):
    logits = normal(32, VOCAB) * 3
    for given in ({"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.9}):
        full = settings(32, seed=np.arange(32), **given)
        quick = draw(logits, full).tokens.tolist()
        monkeypatch.setattr(lib, "NUM_CANDIDATES", 1)
        slow = jax.jit(lambda *a: sample(*a, implementation="reference"))(
            *arguments(logits, full)[0]
        )
        monkeypatch.undo()
        assert slow.tokens.tolist() == quick


def test_draws_come_as_often_as_their_probability_says():
    """Pearson's chi-square over 20,000 draws of 12 tokens and what is left.

    With k - 1 = 12 degrees of freedom the statistic exceeds 40 once in 10,000 tries
    (the 99.99% quantile is 39.1); the seeds are fixed, so the test cannot flicker.
    """
    rows, batches = 2_000, 10
    logits = np.full((1, VOCAB), -4.0, np.float32)
    logits[0, :12] = np.linspace(2, 0, 12)
    probabilities = np.exp(logits[0].astype(np.float64))
    probabilities /= probabilities.sum()
    counts = np.zeros(13)
    for batch in range(batches):
        given = settings(rows, seed=5 + batch)
        tokens = np.asarray(draw(np.tile(logits, (rows, 1)), given).tokens)
        counts += np.bincount(np.minimum(tokens, 12), minlength=13)
    expected = rows * batches * np.array([*probabilities[:12], probabilities[12:].sum()])
    assert ((counts - expected) ** 2 / expected).sum() < 40


@pytest.mark.every_jax
@REFERENCE
def test_noise_has_the_mean_and_variance_of_gumbels_distribution():
    """Mean 0.5772 and variance pi^2 / 6; 200,000 values, bounds of five standard errors."""
    rows, width = 400, 500
    ids = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    noise = np.asarray(
        gumbel(
            jnp.arange(rows, dtype=jnp.uint32),
            jnp.zeros(rows, jnp.uint32),
            jnp.zeros(rows, jnp.int32),
            ids,
        )
    ).astype(np.float64)
    assert np.isfinite(noise).all()
    size, variance = noise.size, math.pi**2 / 6
    assert abs(noise.mean() - 0.5772157) < 5 * math.sqrt(variance / size)
    # The fourth central moment is 27/5 of the variance squared.
    assert abs(noise.var() - variance) < 5 * variance * math.sqrt(4.4 / size)
    rank = np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]
    assert abs(rank) < 5 / math.sqrt(size)


@pytest.mark.parametrize(
    ("key", "counter", "word"),
    [
        ((0, 0), (0, 0), 0x6B200159),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), 0x1CB996FC),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), 0xC4923A9C),
    ],
)
@REFERENCE
def test_threefry_gives_its_authors_test_vectors(key, counter, word):
    """Random123's kat_vectors for threefry2x32 with 20 rounds."""
    k0, k1 = (jnp.full(1, n, jnp.uint32) for n in key)
    x0, x1 = (jnp.full(1, n, jnp.uint32).view(jnp.int32) for n in counter)
    assert int(lib._threefry2x32(k0, k1, x0, x1[None])[0, 0]) == word


@REFERENCE
def test_threefry_equals_jax():
    from jax.extend.random import threefry_2x32

    key = jnp.asarray([123, 456], jnp.uint32)
    counters = jnp.asarray(rng(3).randint(0, 2**31, (2, 50)), jnp.uint32)
    wanted = threefry_2x32(key, counters.reshape(-1))[:50]
    k0, k1 = jnp.full(50, 123, jnp.uint32), jnp.full(50, 456, jnp.uint32)
    x0, x1 = counters.view(jnp.int32)
    np.testing.assert_array_equal(lib._threefry2x32(k0, k1, x0, x1[:, None])[:, 0], wanted)
    row = lib._threefry2x32(k0[:1], k1[:1], x0[:1], x1[None])[0]
    each = lib._threefry2x32(k0, k1, x0[:1].repeat(50), x1[:, None])[:, 0]
    np.testing.assert_array_equal(row, each)


def past(prompt, generated, vocab=VOCAB):
    """What a slot knows of these tokens."""
    in_prompt = jnp.asarray(np.isin(np.arange(vocab), prompt))
    return in_prompt, jnp.asarray(np.bincount(np.array(generated, int), minlength=vocab), jnp.int32)


def history(rows):
    """Prompts and generated tokens of slots that are not the rows' own numbers."""
    slots = np.arange(rows)[::-1].copy()
    prompts = rng(1).randint(0, VOCAB, (rows, 6)).astype(np.int32)
    valid = np.arange(6)[None] < np.array([6, 3, 1])[:rows, None]
    counts = no_counts(rows)
    for row, slot in enumerate(slots):
        counts = counts.replace(jnp.int32(slot), *past(prompts[row][valid[row]], []))
    generated = rng(2).randint(0, 9, (rows, 5)).astype(np.int32)
    for step in range(5):
        counts = counts.add_generated(
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(generated[:, step]),
            jnp.asarray([True, True, step < 2][:rows]),
        )
    seen = [(prompts[r][valid[r]], generated[r][: 2 if r == 2 else 5]) for r in range(rows)]
    return counts, slots, seen


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7, "presence_penalty": -1.5, "repetition_penalty": 1.2},
        {"bias": {3: 2.5, 0: -1.0, 316: 9.0}},
        {"bias": {5: 100.0}, "repetition_penalty": 2.0},
    ],
    ids=str,
)
def test_penalties_and_bias(given):
    """Repetition counts the prompt, presence and frequency what was generated."""
    rows = 3
    counts, slots, seen = history(rows)
    logits = normal(rows, VOCAB, seed=8) * 3
    full = DEFAULTS | {"bias": {}} | given
    got = adjust(
        jnp.asarray(logits),
        settings(rows, **given),
        counts.in_prompt[jnp.asarray(slots)],
        counts.generated[jnp.asarray(slots)],
    )
    wanted = logits.astype(np.float64)
    for row, (prompt, generated) in enumerate(seen):
        for token in {*prompt.tolist(), *generated.tolist()}:
            value, penalty = wanted[row, token], full["repetition_penalty"]
            wanted[row, token] = value / penalty if value > 0 else value * penalty
        for token in set(generated.tolist()):
            count = int((generated == token).sum())
            wanted[row, token] -= full["presence_penalty"] + count * full["frequency_penalty"]
        for token, value in full["bias"].items():
            wanted[row, token] += value
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    greedy = draw(logits, settings(rows, temperature=0.0, **given), counts=counts, slots=slots)
    assert greedy.tokens.tolist() == wanted.argmax(1).tolist()


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@REFERENCE
def test_repetition_penalty_equals_transformers():
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    counts, slots, seen = history(1)
    logits = normal(1, VOCAB, seed=8)
    ids = torch.tensor([np.concatenate(seen[0]).tolist()])
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(ids, torch.tensor(logits))
    got = adjust(
        jnp.asarray(logits),
        settings(1, repetition_penalty=1.3),
        counts.in_prompt[jnp.asarray(slots)],
        counts.generated[jnp.asarray(slots)],
    )
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6)


@REFERENCE
def test_a_slot_that_changes_hands_forgets_its_former_sequence():
    counts, slots, _ = history(3)
    row, others = int(slots[0]), [int(s) for s in slots[1:]]
    after = counts.replace(jnp.int32(row), *past([4], [9, 9]))
    assert np.flatnonzero(after.in_prompt[row]).tolist() == [4]
    assert {int(t): int(after.generated[row][t]) for t in np.flatnonzero(after.generated[row])} == {
        9: 2
    }
    for name in ("in_prompt", "generated"):
        np.testing.assert_array_equal(
            getattr(after, name)[np.array(others)], getattr(counts, name)[np.array(others)]
        )


def test_logprobs_are_those_of_the_raw_logits():
    logits = normal(3, VOCAB) * 2
    given = settings(
        3, temperature=[0.0, 1.0, 2.0], num_logprobs=[0, -1, 5], top_k=2, bias={8: 50.0}
    )
    out = draw(logits, given)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    rows = np.array([0, 2])  # those that ask
    chosen = exact[rows, out.tokens[rows]]
    np.testing.assert_allclose(out.logprobs[rows], chosen, rtol=1e-5, atol=1e-5)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_tokens[rows], order[rows])
    wanted = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(out.top_logprobs[rows], wanted[rows], rtol=1e-5, atol=1e-5)


def test_a_vocabulary_smaller_than_the_candidates_and_the_logprobs():
    logits = normal(2, 11)
    given = settings(2, top_p=0.5, num_logprobs=20, seed=[1, 2])
    out = draw(logits, given)
    for row in range(2):
        assert int(out.tokens[row]) in kept_by_hand(logits[row], 1.0, 0, 0.5, 0.0)[0]
    assert out.top_tokens.shape == (2, 11)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_banned_and_early_stop_ids(temperature):
    logits = np.tile(normal(1, VOCAB, seed=3) * 3, (40, 1))
    best = np.argsort(-logits[0])

    def chosen(position=5, **given):
        seeds = list(range(40))
        given = settings(40, temperature=temperature, seed=seeds, **given)
        return set(draw(logits, given, np.full(40, position)).tokens.tolist())

    allowed = [int(best[9]), int(best[30]), int(best[200])]
    assert chosen(allowed=allowed) <= set(allowed)
    assert allowed[0] in chosen(allowed=allowed)
    banned = [int(t) for t in best[:3]]
    assert not chosen(bias=dict.fromkeys(banned, -np.inf)) & set(banned)
    early = chosen(position=4, stop=banned, min_position=5)
    assert not early & set(banned)
    assert chosen(position=5, stop=banned, min_position=5) == chosen()
    assert int(best[0]) in chosen()


def test_limits_of_one_row_are_not_those_of_another():
    logits = normal(2, VOCAB)
    given = settings(2, temperature=0.0)
    allowed = given.allowed_ids.at[0, 0].set(5)
    given = dataclasses.replace(given, allowed_ids=allowed)
    assert draw(logits, given).tokens.tolist() == [5, int(logits[1].argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_so_alone(temperature, bad):
    logits = normal(3, VOCAB)
    wanted = draw(logits, settings(3, temperature=temperature, top_p=0.9)).tokens.tolist()
    logits[1, 200] = bad
    got = draw(logits, settings(3, temperature=temperature, top_p=0.9))
    assert got.is_finite.tolist() == [True, False, True]
    assert [got.tokens.tolist()[i] for i in (0, 2)] == [wanted[0], wanted[2]]
    greedy = draw(logits, settings(3, temperature=0.0), greedy=True)
    assert greedy.is_finite.tolist() == [True, False, True]
    assert got.is_allowed.tolist() == [True, True, True]
    nothing_left = settings(3, temperature=temperature, allowed=[4], bias={4: -np.inf})
    got = draw(normal(3, VOCAB), nothing_left)
    assert got.is_finite.tolist() == [True] * 3 and got.is_allowed.tolist() == [False] * 3


def primitives(jaxpr, inside=False):
    """(primitive, whether it lies in a branch of a cond) of a jaxpr, all levels down."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inside
        branch = inside or equation.primitive.name == "cond"
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner, branch)


COSTLY = {"sort", "top_k", "approx_top_k", "cumsum", "exp", "log", "shift_left"}


@REFERENCE
def test_greedy_pays_nothing_for_sampling():
    """Sorting, softmax, noise and penalties lie in branches that greedy rows do not take."""
    given, _ = arguments(jnp.zeros((3, VOCAB)), settings(3))
    found = list(primitives(jax.make_jaxpr(lib._sample)(*given, None, None).jaxpr))
    assert {name for name, inside in found if inside} >= {"top_k", "sort", "cumsum"}
    assert not {name for name, inside in found if not inside} & COSTLY


@REFERENCE
def test_branches_survive_compilation():
    """XLA's own program keeps the sort inside a conditional."""
    given, _ = arguments(jnp.zeros((3, VOCAB)), settings(3))
    text = compiled("reference").lower(*given).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "conditional(" in entry
    assert "sort(" in text and not re.search(r"\b(sort|topk)\(", entry, re.I)


@REFERENCE
def test_bits_are_read_from_the_lowest_of_each_word_on():
    words = np.random.RandomState(0).randint(-(2**31), 2**31, (3, 10)).astype(np.int32)
    wanted = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    for count in (1, 31, 32, 33, VOCAB, 320):
        got = jax.jit(lib.unpack_bits, static_argnums=1)(words, count)
        np.testing.assert_array_equal(got, wanted[:, :count].astype(bool))


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 9, "top_p": 0.8}],
    ids=str,
)
def test_a_guided_row_takes_what_it_would_if_the_rest_were_minus_infinity(given):
    """Masks belong to slots; rows without a constraint pass over what is there."""
    rows = 8
    logits, state = normal(rows, VOCAB), np.random.RandomState(1)
    slots = state.permutation(rows)
    is_masked = (np.arange(rows) % 4 != 3).astype(np.int32)
    allowed = state.rand(rows, 320) < 0.05
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    banned = np.where(allowed[slots, :VOCAB] | (is_masked == 0)[:, None], logits, -np.inf)
    wanted = draw(banned.astype(np.float32), settings(rows, **given))
    got = draw(logits, settings(rows, is_masked=is_masked, **given), slots=slots, masks=masks)
    tokens = np.asarray(got.tokens)
    np.testing.assert_array_equal(tokens, np.asarray(wanted.tokens))
    assert all(allowed[slots[r], tokens[r]] for r in range(rows) if is_masked[r])
    assert np.asarray(got.is_allowed).all()


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("vocab", [11, VOCAB, 5003])
@REFERENCE
def test_the_native_sampler_is_the_reference(instruction_set, vocab):
    """Rows that want anything at all, each something else: equal tokens, equal answers."""
    rows, state = 96, rng(vocab)
    slots = state.permutation(rows)

    def some(values, off):
        return np.where(state.rand(rows) < 0.5, state.choice(values, rows), off)

    given = settings(
        rows,
        seed=state.randint(0, 2**31, rows),
        sample_index=some([1, 2], 0),
        temperature=some([0.5, 1.0, 1.7], 0.0),
        top_k=some([1, 5, 300, 2000], 0),
        top_p=some([0.3, 0.9, 0.999], 1.0),
        min_p=some([0.01, 0.2], 0.0),
        repetition_penalty=some([0.7, 1.3], 1.0),
        presence_penalty=some([-0.5, 0.8], 0.0),
        frequency_penalty=some([-0.2, 0.4], 0.0),
        num_logprobs=some([0, 7], -1),
        min_position=some([50], 0),
        scores_adjusted=some([1], 0),
        is_masked=some([1], 0),
        bias={1: 2.0, 3: -np.inf, 8: -1.5},
        stop=[2, 5],
    )
    limits = np.asarray(given.allowed_ids).copy()
    limits[::5] = [0, 4, 9, 10]
    given = dataclasses.replace(given, allowed_ids=jnp.asarray(limits))
    logits = (state.randn(rows, vocab) * state.choice([0.2, 3.0], (rows, 1))).astype(np.float32)
    logits[:, 6] = -np.inf
    logits[90, 5], logits[91, 7], logits[92] = np.nan, np.inf, -np.inf
    counts = TokenCounts(
        jnp.asarray(state.rand(rows + 1, vocab) < 0.1),
        jnp.asarray(state.poisson(0.1, (rows + 1, vocab)), jnp.int32),
    )
    named = {
        "counts": counts, "slots": slots, "positions": state.randint(0, 100, rows),
        "masks": state.randint(-(2**31), 2**31, (rows, -(-vocab // 32))).astype(np.int32),
        "pending": state.randint(-1, vocab, (rows, 3)),
    }  # fmt: skip
    values, pending = arguments(logits, given, **named)
    found, wanted = (
        jax.device_get(compiled(name)(*values, **pending)) for name in ("native", "reference")
    )
    sane = wanted.is_finite & wanted.is_allowed
    assert sane.sum() > 60
    for name in ("is_finite", "is_allowed"):
        np.testing.assert_array_equal(getattr(found, name)[:90], getattr(wanted, name)[:90])
    assert not found.is_finite[90:93].any()
    np.testing.assert_array_equal(found.tokens[sane], wanted.tokens[sane])
    asks = sane & (np.asarray(given.num_logprobs) >= 0)
    np.testing.assert_array_equal(found.top_tokens[asks], wanted.top_tokens[asks])
    for name in ("logprobs", "top_logprobs"):
        mine, theirs = (getattr(sampled, name)[asks] for sampled in (found, wanted))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("size", [1, 15, 300, 50257])
@pytest.mark.parametrize("kind", ["normal", "equals", "ascending", "descending", "banned"])
@pytest.mark.parametrize("implementation", ["native"], indirect=True)
def test_the_largest_come_in_order(implementation, size, kind):
    """As lax.top_k: largest first, the first of equals first."""
    state = rng(size)
    x = {
        "normal": state.standard_normal((3, size)),
        "equals": state.randint(0, 3, (3, size)),
        "ascending": np.arange(3 * size).reshape(3, size) / size,
        "descending": -np.arange(3 * size).reshape(3, size) / size,
        "banned": np.where(state.rand(3, size) < 0.99, -np.inf, 1.0),
    }[kind].astype(np.float32)
    x[:, 0] = 1.0
    x = jnp.asarray(x)
    found = draw(x, settings(3, temperature=0.0, num_logprobs=0))
    values, ids = jax.lax.top_k(lib._logprobs(x, x.max(1)[:, None]), min(20, size))
    np.testing.assert_allclose(found.top_logprobs, values, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.top_tokens, ids)


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@REFERENCE
def test_what_does_not_fit_the_native_sampler_is_rejected():
    values, _ = arguments(normal(2, VOCAB), settings(2))
    for index, wrong in {1: values[1][:, :-1], 4: values[4] + 2}.items():
        with pytest.raises(Exception, match="rooflax sample: "):
            jax.block_until_ready(compiled("native")(*values[:index], wrong, *values[index + 1 :]))


FLAT = {
    "normal": lambda state, vocab: state.standard_normal(vocab) * 0.5,
    "wide": lambda state, vocab: state.standard_normal(vocab) * 3 - 40,
    "equal": lambda state, vocab: np.zeros(vocab),
    "few values": lambda state, vocab: state.randint(0, 4, vocab) / 4,
    "a peak": lambda state, vocab: np.where(np.arange(vocab) == 9, 7, state.rand(vocab)),
}


SEEDS = np.arange(4) + 11


@functools.cache
def cuts_of(kind, vocab):
    """A row of logits, and filters with the tokens that draws at position 5 then are: filters
    that end at the token which would win without, and those that end before it."""
    logits = FLAT[kind](rng(vocab), vocab).astype(np.float32)
    ids = np.broadcast_to(np.arange(vocab, dtype=np.int32), (len(SEEDS), vocab))
    zeros, positions = np.zeros(len(SEEDS), np.uint32), np.full(len(SEEDS), 5, np.int32)
    noise = np.asarray(noise_of(SEEDS.astype(np.uint32), zeros, positions, ids))
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    upto = np.cumsum(weights) / weights.sum()
    cuts = []
    for row in range(len(SEEDS)):
        rank = int(np.flatnonzero(order == np.argmax(logits + noise[row]))[0])
        half = weights[rank] / weights.sum() / 2
        cuts.append((row, {"top_k": rank + 1}, True))
        cuts.append((row, {"top_p": upto[rank] - half}, True))
        cuts.append((row, {"min_p": weights[rank] * (1 - 1e-5)}, True))
        if rank == 0:
            continue
        cuts.append((row, {"top_k": rank}, False))
        cuts.append((row, {"top_p": upto[rank] - 3 * half}, False))
        if weights[rank] < 0.999:
            cuts.append((row, {"min_p": weights[rank] * (1 + 1e-5)}, False))
        both = {"top_k": rank + 1, "top_p": 1 - half / upto[rank]}
        cuts.append((row, both, True))
    found = []
    for row, cut, survives in cuts:
        filters = [float(np.float32(cut.get(n, DEFAULTS[n]))) for n in ("top_p", "min_p")]
        kept, scaled = kept_by_hand(logits, 1.0, cut.get("top_k", 0), *filters)
        wanted = kept[np.argmax(scaled.astype(np.float32) + noise[row, kept])]
        assert (wanted == np.argmax(logits + noise[row])) == survives, cut
        found.append((row, cut, int(wanted)))
    return logits, found


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("vocab", cases([50_257, 151_936], nightly=[151_936]))
@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("implementation", ["native"], indirect=True)
def test_filters_cut_a_flat_row_where_they_should(implementation, instruction_set, kind, vocab):
    """The token that would win without a filter is the last that survives, or the first that
    does not: a position that is off by one token draws another."""
    logits, cuts = cuts_of(kind, vocab)
    given = {
        name: [float(cut.get(name, DEFAULTS[name])) for _, cut, _ in cuts]
        for name in ("top_k", "top_p", "min_p")
    }
    full = settings(len(cuts), seed=SEEDS[[row for row, _, _ in cuts]], **given)
    tokens = draw(np.tile(logits, (len(cuts), 1)), full, [5] * len(cuts)).tokens.tolist()
    for token, (_, cut, wanted) in zip(tokens, cuts, strict=True):
        assert token == wanted, cut


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("vocab", cases([50_257, 151_936], nightly=[151_936]))
@pytest.mark.parametrize("implementation", ["native"], indirect=True)
def test_flat_rows_draw_as_the_sorted_reference_in_any_batch(
    implementation, instruction_set, vocab
):
    given = {
        "temperature": [1.0, 1.7, 0.6, 1.0, 1.0, 1.3, 1.0, 1.0],
        "top_p": [0.95, 0.999, 0.5, 1.0, 1.0, 0.9, 1.0, 1e-6],
        "min_p": [0.0, 0.0, 0.0, 0.05, 0.5, 0.1, 0.0, 0.0],
        "top_k": [0, 0, 0, 0, 30_000, 40_000, 5000, 0],
    }
    rows = len(given["top_k"])
    logits = (rng(vocab).standard_normal((rows, vocab)) * 0.7).astype(np.float32)
    full = settings(rows, seed=np.arange(rows), **given)
    values, _ = arguments(logits, full)
    together = compiled("native")(*values).tokens.tolist()
    alone = [
        int(draw(logits[row : row + 1], jax.tree.map(lambda x, row=row: x[row : row + 1], full),
                 [row]).tokens[0])
        for row in range(rows)
    ]  # fmt: skip
    assert together == alone
    assert together == compiled("reference")(*values).tokens.tolist()
