"""One training step: what it computes must not depend on how it is computed."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rooflax.nn.layers import unstack_layers
from rooflax.nn.weights import WeightLine
from rooflax.train.config import REMAT
from rooflax.train.data import Encoded, Rows, open_corpus, write_corpus
from rooflax.train.step import (
    decay_mask,
    global_norm,
    init_state,
    learning_rate,
    make_eval_step,
    make_optimizer,
    make_train_step,
)
from tests.marks import cases
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

ROWS, SEQ = 8, 24


# An optimizer that leaves the weights alone and keeps the gradient.
KEEP_GRADIENT = optax.GradientTransformation(
    lambda weights: jax.tree.map(jnp.zeros_like, weights),
    lambda grads, state, weights=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


def settings(**changes):
    return tiny.settings(**({"batch_size": ROWS, "seq_len": SEQ} | changes))


def gradient(model, config, batch):
    """(loss, gradient by weight, norm, temporary bytes) of one step as training computes them."""
    if config.layers == "scan":
        model = model.stacked()
    state = init_state(model.weights, KEEP_GRADIENT)
    step = make_train_step(model, KEEP_GRADIENT, config)
    program = step.lower(state, model.rope, batch).compile()
    state, metrics = program(state, model.rope, batch)
    grads = jax.tree.map(np.asarray, state.opt_state)
    grads = unstack_layers(grads) if config.layers == "scan" else grads
    bytes_ = program.memory_analysis().temp_size_in_bytes
    return metrics.loss, grads, metrics.grad_norm, bytes_


def deviation(a, b):
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def plain():
    """By family: model, batch, and (loss, gradient, norm, bytes) of one unrolled batch."""
    made = {}

    def get(family):
        if family not in made:
            model = tiny.make_model(family, noise=0.1)
            batch = tiny.random_batch(ROWS, SEQ)
            made[family] = model, batch, gradient(model, settings(), batch)
        return made[family]

    return get


@pytest.mark.every_jax
@pytest.mark.parametrize("family", cases(tiny.FAMILIES, default=["llama"]))
def test_the_gradient_is_the_slope_of_the_loss(plain, family):
    """Along its own direction, by central differences of the evaluation's loss."""
    model, batch, (loss, grads, norm, _) = plain(family)
    if family == "gpt_oss":  # choosing experts has no slope: all are chosen here
        model = tiny.make_model(family, noise=0.1, num_experts_per_tok=5, num_hidden_layers=2)
        loss, grads, norm, _ = gradient(model, settings(), batch)
    evaluate = make_eval_step(model, settings())
    at, count, _ = evaluate(model.weights, model.rope, batch)
    np.testing.assert_allclose(float(at) / float(count), float(loss), rtol=1e-5)
    step = 0.005 / float(norm)

    def loss_at(distance):
        moved = jax.tree.map(
            lambda w, g: np.asarray(w) + np.float32(distance) * g, model.weights, grads
        )
        return float(evaluate(moved, model.rope, batch)[0]) / float(count)

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(float(norm) ** 2, rel=5e-3)


@pytest.mark.parametrize("family", cases(tiny.FAMILIES, default=["gpt_oss"]))
def test_micro_batches_equal_one_batch(plain, family):
    """Rows have unequal numbers of targets, so a mean of means would not do."""
    model, batch, (loss, grads, norm, _) = plain(family)
    assert len({int(part.sum()) for part in np.split(batch.mask, 4)}) > 1
    got, got_grads, got_norm, _ = gradient(model, settings(micro_batches=4), batch)
    np.testing.assert_allclose(got, loss, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_norm, norm, rtol=1e-5)
    assert deviation(got_grads, grads) < 1e-5


@pytest.mark.parametrize("family", cases(tiny.FAMILIES, default=["gpt_oss"]))
def test_packed_documents_equal_each_alone(plain, family, tmp_path):
    """With some tokens masked; also where a row is computed for itself (micro-batches)."""
    rng = np.random.default_rng(3)
    encoded = []
    for length in rng.integers(2, SEQ + 2, 20):
        mask = [*(rng.random(length - 1) < 0.6), True]
        encoded.append(Encoded(rng.integers(1, tiny.VOCAB, length), mask, 1))

    def batch_of(documents, rows=None):
        write_corpus(tmp_path / "a", documents, tiny.VOCAB, is_whole=True)
        found = Rows(open_corpus(tmp_path / "a"), SEQ)
        return next(found.spread(None, rows or 2 * found.num_rows))

    alone = [batch_of([each], rows=1) for each in encoded]
    alone = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
    packed = batch_of(encoded)  # half of it is filled up
    assert len(packed.mask) // 2 < len(alone.mask) == len(encoded)
    model, *_ = plain(family)
    wanted, wanted_grads, *_ = gradient(model, settings(batch_size=len(alone.mask)), alone)
    for micro in (1, 2):
        config = settings(batch_size=len(packed.mask), micro_batches=micro)
        loss, grads, *_ = gradient(model, config, packed)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        assert deviation(grads, wanted_grads) < 1e-5


def trained(model, config, batches):
    """Weights and losses of a few steps."""
    optimizer = make_optimizer(model.table, model.weights, config)
    state = init_state(model.weights, optimizer)
    step = make_train_step(model, optimizer, config)
    losses = []
    for batch in batches:
        state, metrics = step(state, model.rope, batch)
        losses.append(float(metrics.loss))
    return state, losses


def test_remat_gives_the_same_gradients_in_less_memory(capsys):
    model = tiny.make_model("llama", noise=0.1, num_hidden_layers=4)
    batch = tiny.random_batch(ROWS, 64)
    table = {}
    for layers, policies in (("unrolled", (None, "nothing")), ("scan", (None, *REMAT))):
        for remat in policies:
            config = settings(seq_len=64, remat=remat, layers=layers)
            loss, grads, _, table[layers, remat] = gradient(model, config, batch)
            if not (remat or layers == "scan"):
                first = loss, grads
            np.testing.assert_allclose(loss, first[0], rtol=1e-6)
            assert deviation(grads, first[1]) < 1e-6
    with capsys.disabled():
        print(f"\n\n| layers | kept | temporary KB |   (LLaMA, 4 layers, {ROWS} rows of 64)")
        print("| --- | --- | --- |")
        for (layers, remat), size in table.items():
            print(f"| {layers} | {remat or 'all'} | {size / 1e3:,.0f} |")
    assert table["scan", "nothing"] < 0.5 * table["scan", None]
    assert table["scan", "nothing"] < table["scan", "dots_no_batch"] < table["scan", "dots"]
    assert table["scan", "dots"] < table["scan", "everything"]
    # JAX 0.10's CPU compiler merges what unrolled layers compute twice: nothing is gained there.


def test_documents_of_a_row_do_not_see_each_other():
    """A row of two documents has the loss of two rows with one each."""
    model = tiny.make_model("llama", noise=0.1)
    evaluate = make_eval_step(model, settings(batch_size=1))
    ids = np.random.default_rng(0).integers(1, tiny.VOCAB, SEQ + 1).astype(np.int32)
    ids[9] = tiny.SEPARATOR

    def loss_of(document):
        filled = np.r_[document, np.full(SEQ + 1 - len(document), 5, np.int32)]
        batch = tiny.pack_separated(filled[None], tiny.SEPARATOR)
        batch.mask[:, len(document) - 1 :] = 0
        loss, count, _ = evaluate(model.weights, model.rope, batch)
        return float(loss), float(count)

    whole, parts = loss_of(ids), [loss_of(ids[:10]), loss_of(ids[10:])]
    assert whole[1] == sum(count for _, count in parts) == SEQ - 1
    assert whole[0] == pytest.approx(sum(loss for loss, _ in parts), rel=1e-5)


def test_the_loss_by_hand():
    """Against NumPy on the model's logits; masked targets do not count."""
    from rooflax.nn.batch import Batch

    model = tiny.make_model("llama", noise=0.1)
    batch = tiny.random_batch(ROWS, SEQ)

    @jax.jit
    def logits_of(model, tokens, positions, segment_ids):
        tokens = Batch.dense(tokens, positions=positions, segment_ids=segment_ids)
        return model.logits(model.forward(tokens)[0])

    logits = logits_of(model, batch.tokens, batch.positions, batch.segment_ids)
    logits = np.asarray(logits, np.float64)
    total = 0.0
    for row, targets, mask in zip(logits, batch.targets, batch.mask, strict=True):
        for scores, target, counts in zip(row, targets, mask, strict=True):
            total += counts * (np.log(np.exp(scores).sum()) - scores[target])
    loss, count, _ = make_eval_step(model, settings())(model.weights, model.rope, batch)
    assert float(count) == batch.mask.sum() < ROWS * SEQ
    assert float(loss) == pytest.approx(total, rel=1e-5)


@pytest.fixture(scope="module")
def short_run(corpora):
    """State and losses of 60 steps on real text."""
    rows = Rows(corpora[0], 32)

    def run(model, **changes):
        config = settings(seq_len=32, steps=60, learning_rate=1e-2, **changes)
        batches = [rows.batch(step, ROWS) for step in range(60)]
        return trained(model, config, batches)

    return run


def test_bfloat16_ends_within_a_percent_of_float32(short_run):
    model = tiny.make_model("llama")
    _, in_float32 = short_run(model)
    state, in_bfloat16 = short_run(model, dtype="bfloat16")
    ends = [sum(losses[-10:]) / 10 for losses in (in_float32, in_bfloat16)]
    print(f"float32 ends at {ends[0]:.4f}, bfloat16 at {ends[1]:.4f}")
    assert in_float32 != in_bfloat16
    assert ends[0] < in_float32[0] - 1.5
    assert ends[1] == pytest.approx(ends[0], rel=0.01)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {jnp.dtype(jnp.float32)}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(jnp.float32)}


VECTORS = ("bias", "sinks", "norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight",
           "ln_f.weight")  # fmt: skip


def by_slot(model, tree):
    """(name, whether the checkpoint holds matrices there, leaf of the tree)."""
    for slot in model.config.params():
        place = tree if slot.layer is None else tree["layers"][slot.layer]
        yield slot.name, not slot.hf_names[0].endswith(VECTORS), place[slot.key]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_which_weights_are_matrices(family):
    model = tiny.make_model(family)
    found = list(by_slot(model, decay_mask(model.table, model.weights)))
    for name, wanted, decays in found:
        assert decays is wanted, name
    assert sum(wanted for _, wanted, _ in found) >= 1 + 4 * model.config.num_layers
    stacked = model.stacked().weights
    mask = decay_mask(model.table, stacked)
    assert jax.tree.structure(mask) == jax.tree.structure(stacked)
    for group, first in zip(mask["stacked_layers"], model.weights["layers"], strict=False):
        assert group.keys() == first.keys()
        assert group["attn.o"]
        assert not group["attn.norm"]


def rates(**changes):
    config = settings(**changes)
    rate = learning_rate(config)
    return [float(rate(count)) for count in range(config.num_steps)]


def test_the_schedule_by_hand():
    found = rates(steps=12, warmup_steps=4, learning_rate=0.8, min_lr_ratio=0.25)
    rise = [0.2, 0.4, 0.6, 0.8]
    fall = [0.8 * (0.25 + 0.75 * (1 + math.cos(math.pi * t / 8)) / 2) for t in range(1, 9)]
    np.testing.assert_allclose(found, rise + fall, rtol=1e-6)
    assert found[-1] == pytest.approx(0.2)
    assert found[7] == pytest.approx(0.8 * 0.625)  # half way down


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"steps": 1, "warmup_steps": 0}, [1.0]),
        ({"steps": 1, "warmup_steps": 1}, [1.0]),
        ({"steps": 2, "warmup_steps": 0}, [1.0, 0.1]),
        ({"steps": 3, "warmup_steps": 0}, [1.0, 0.55, 0.1]),
        ({"steps": 4, "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"steps": 4, "warmup_steps": 100}, [0.25, 0.5, 0.75, 1.0]),
        ({"steps": 3, "warmup_steps": 1, "min_lr_ratio": 1.0}, [1.0, 1.0, 1.0]),
        ({"steps": 2, "warmup_steps": 1, "min_lr_ratio": 0.0}, [1.0, 0.0]),
        ({"tokens": 2 * ROWS * SEQ, "warmup_steps": 1}, [1.0, 0.1]),
    ],
)
def test_edges_of_the_schedule(changes, wanted):
    np.testing.assert_allclose(rates(learning_rate=1.0, **changes), wanted, rtol=1e-6, atol=1e-7)


def small_table():
    """A matrix and a vector."""
    return {"a": WeightLine("x -> y", "a"), "b": WeightLine("x", "b", init="zeros")}


def test_adamw_by_hand():
    """Two steps against the paper's formulas in NumPy."""
    config = settings(
        steps=10, warmup_steps=4, learning_rate=0.1, weight_decay=0.3, clip_norm=0.0, beta1=0.8,
        beta2=0.9,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((3, 2)), "b": rng.standard_normal(3)}
    grads = [{k: rng.standard_normal(w.shape) for k, w in weights.items()} for _ in range(2)]

    def as_jax(tree):
        return {name: jnp.asarray(value, jnp.float32) for name, value in tree.items()}

    optimizer = make_optimizer(small_table(), weights, config)
    found = as_jax(weights)
    state = optimizer.init(found)
    for grad in grads:
        updates, state = optimizer.update(as_jax(grad), state, found)
        found = optax.apply_updates(found, updates)
    for name, w in weights.items():
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, grad in enumerate(grads, start=1):
            g, rate = grad[name], 0.1 * t / 4
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
            w = w - rate * (direction + (0.3 * w if name == "a" else 0.0))
        np.testing.assert_allclose(found[name], w, rtol=1e-5, atol=1e-6)


def fused_table():
    """Heads of queries, keys and values in one weight, the heads' output, and an embedding."""
    return {
        "embed": WeightLine("vocab hidden", "e"),
        "layers.{i}.qkv": WeightLine("hidden -> kv_heads qkv_group head_dim", "q"),
        "layers.{i}.o": WeightLine("heads head_dim -> hidden", "o", init="residual"),
        "layers.{i}.norm": WeightLine("hidden", "n", init="ones"),
    }


def test_muon_by_hand():
    """A step against the papers' formulas: momentum as Nesterov has it, whose singular values five
    iterations bring near 1, as large as AdamW's updates; each head by itself. The rest by AdamW,
    with Nesterov's momentum too."""
    config = settings(
        steps=10, warmup_steps=1, learning_rate=0.1, weight_decay=0.3, clip_norm=0.0,
        optimizer="muon",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = {"qkv": (6, 2, 3, 4), "o": (4, 4, 6), "norm": (6,)}
    layer = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    weights = {"embed": rng.standard_normal((8, 6)), "layers": (layer,)}
    grads = jax.tree.map(lambda w: rng.standard_normal(w.shape), weights)
    as_jax = partial(jax.tree.map, lambda w: jnp.asarray(w, jnp.float32))
    optimizer = make_optimizer(fused_table(), weights, config)
    found, _ = optimizer.update(as_jax(grads), optimizer.init(as_jax(weights)), as_jax(weights))

    def orthogonalized(g):
        """Of one matrix, with the coefficients of the first paper."""
        x = g / (np.linalg.norm(g) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return 0.2 * np.sqrt(max(g.shape)) * x

    ((layer_grads,), (updates,)) = grads["layers"], found["layers"]
    for i, j in np.ndindex(2, 3):
        wanted = -0.1 * (orthogonalized(layer_grads["qkv"][:, i, j]) + 0.3 * layer["qkv"][:, i, j])
        np.testing.assert_allclose(updates["qkv"][:, i, j], wanted, rtol=1e-4, atol=1e-5)
    whole, weight = layer_grads["o"].reshape(16, 6), layer["o"].reshape(16, 6)
    wanted = -0.1 * (orthogonalized(whole.T).T + 0.3 * weight)
    np.testing.assert_allclose(updates["o"].reshape(16, 6), wanted, rtol=1e-4, atol=1e-5)
    for name, update, grad in [
        ("embed", found["embed"], grads["embed"]),
        ("norm", updates["norm"], layer_grads["norm"]),
    ]:
        momentum = 0.9 * 0.1 / (1 - 0.9**2) + 0.1 / (1 - 0.9)
        wanted = -0.1 * momentum * np.sign(grad)
        np.testing.assert_allclose(update, wanted, rtol=1e-5, err_msg=name)


def test_muon_updates_stacked_layers_as_layers_of_their_own():
    model = tiny.make_model("llama")
    config, updates = settings(optimizer="muon"), []
    rng = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda w: jnp.asarray(rng.standard_normal(w.shape), w.dtype), model.weights
    )
    for made in (model, model.stacked()):
        given = grads if made is model else replace(model, weights=grads).stacked().weights
        optimizer = make_optimizer(made.table, made.weights, config)
        update, _ = optimizer.update(given, optimizer.init(made.weights), made.weights)
        updates.append(update if made is model else unstack_layers(update))
    for one, other in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("clip", "size", "factor"), [(1.0, 10.0, 0.1), (1.0, 0.5, 1.0), (0.0, 10.0, 1.0), (4, 5, 0.8)]
)
def test_clipping_by_global_norm(clip, size, factor):
    config = settings(clip_norm=clip, beta1=0.75)
    weights = {"a": jnp.ones((2, 2)), "b": jnp.ones(3)}
    grads = {
        "a": jnp.zeros((2, 2)).at[0, 1].set(0.6 * size),
        "b": jnp.zeros(3).at[2].set(-0.8 * size),
    }
    optimizer = make_optimizer(small_table(), weights, config)
    _, state = optimizer.update(grads, optimizer.init(weights), weights)
    moments = optax.tree_utils.tree_get(state, "mu")
    for name in grads:
        np.testing.assert_allclose(moments[name], 0.25 * factor * grads[name], rtol=1e-6)


@pytest.fixture(scope="module")
def run():
    """(model, function of weights and batches that gives the last state and metrics)."""
    model = tiny.make_model("llama")
    config = settings(weight_decay=0.0, clip_norm=1e-3)
    optimizer = make_optimizer(model.table, model.weights, config)
    step = make_train_step(model, optimizer, config)

    def steps(weights, *batches):
        state = init_state(weights, optimizer)
        for batch in batches:
            state, metrics = step(state, model.rope, batch)
        assert step._cache_size() == 1
        return state, metrics

    return model, steps


@pytest.mark.every_jax
class TestOneProgram:
    """What a run's one compiled step does."""

    def test_is_compiled_once_and_counts_its_steps(self, run):
        model, steps = run
        batches = [tiny.random_batch(ROWS, SEQ, seed=seed) for seed in range(3)]
        state, metrics = steps(model.weights, *batches)
        assert int(state.step) == 3
        assert float(metrics.count) == batches[-1].mask.sum()

    def test_the_norm_is_from_before_clipping(self, run):
        model, steps = run
        state, metrics = steps(model.weights, tiny.random_batch(ROWS, SEQ))
        assert float(metrics.grad_norm) > 0.1
        moments = optax.tree_utils.tree_get(state.opt_state, "mu")
        assert float(global_norm(moments)) == pytest.approx(0.1 * 1e-3, rel=1e-4)

    def test_without_targets_nothing_changes(self, run):
        model, steps = run
        batch = tiny.random_batch(ROWS, SEQ)
        batch.mask[:] = 0
        state, metrics = steps(model.weights, batch)
        assert (float(metrics.loss), float(metrics.grad_norm)) == (0.0, 0.0)
        assert deviation(state.weights, model.weights) == 0.0

    def test_masters_are_float32_copies(self, run):
        """Whatever the model's own width; the step may give its state away, the model stays."""
        model, steps = run
        for dtype in (jnp.bfloat16, jnp.float32):
            given = jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), model.weights)
            before = jax.tree.map(np.array, given)
            state, _ = steps(given, tiny.random_batch(ROWS, SEQ))
            dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.weights)}
            assert dtypes == {jnp.dtype(jnp.float32)}
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(given), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_the_rope_table_is_not_trained(self, run):
        model, steps = run
        (rope,) = model.rope
        before = np.array(rope.cos), np.array(rope.sin)
        state, _ = steps(model.weights, tiny.random_batch(ROWS, SEQ))
        assert jax.tree.structure(state.weights) == jax.tree.structure(model.weights)
        names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
        assert not any("rope" in name or "cos" in name for name in names)
        np.testing.assert_array_equal(rope.cos, before[0])
        np.testing.assert_array_equal(rope.sin, before[1])
