"""Longer tests beside those of tests/engine/train/test_step.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.nn.layers import unstack_layers
from rooflax.train.step import global_norm, init_state, make_optimizer
from tests.engine.train import test_step as beside
from tests.engine.train.test_step import ROWS, SEQ, by_slot, deviation, gradient, settings, trained
from tests.support.train import tiny

plain = beside.plain
short_run = beside.short_run


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_weight_has_a_finite_gradient(plain, family):
    model, _, (loss, grads, norm, _) = plain(family)
    assert np.isfinite(float(loss))
    assert jax.tree.structure(grads) == jax.tree.structure(model.weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert leaf.dtype == jnp.float32, name
        assert np.isfinite(leaf).all(), name
        assert leaf.any(), name
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
    assert float(norm) == pytest.approx(math.sqrt(sum((x**2).sum() for x in leaves)), rel=1e-5)


def test_every_expert_and_head_has_a_gradient(plain):
    _, _, (_, grads, _, _) = plain("gpt_oss")
    for layer in grads["layers"]:
        for name in ("mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias"):
            for expert, part in enumerate(layer[name]):
                assert part.any(), (name, expert)
        assert (layer["attn.sinks"] != 0).all()
        assert layer["mlp.router"].any(axis=0).all()


def test_micro_batches_give_the_same_weights():
    model = tiny.make_model("llama")
    batches = [tiny.random_batch(ROWS, SEQ, seed=i) for i in range(6)]
    one, losses = trained(model, settings(), batches)
    moved = deviation(one.weights, model.weights)
    assert moved > 5e-3
    many, many_losses = trained(model, settings(micro_batches=4), batches)
    np.testing.assert_allclose(many_losses, losses, rtol=0, atol=1e-5)
    off = deviation(one.weights, many.weights)
    print(f"4 micro-batches: weights moved by {moved:.1e} differ by {off:.1e}")
    assert off < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scanned_layers_give_the_same_gradients(plain, family):
    model, batch, (loss, grads, _, _) = plain(family)
    got, got_grads, _, _ = gradient(model, settings(layers="scan", remat="nothing"), batch)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert deviation(got_grads, grads) < 1e-6


def test_gpt_oss_learns(short_run):
    """Its experts run densely: the grouped ones have no reverse derivative."""
    _, losses = short_run(tiny.make_model("gpt_oss", num_hidden_layers=2))
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bfloat16_gradients_are_near_those_of_float32(plain, family):
    model, batch, (loss, grads, norm, _) = plain(family)
    got, got_grads, _, _ = gradient(model, settings(dtype="bfloat16"), batch)
    assert float(got) == pytest.approx(float(loss), rel=0.01)
    assert float(got) != float(loss)
    off = global_norm(jax.tree.map(np.subtract, got_grads, grads))
    assert {leaf.dtype for leaf in jax.tree.leaves(got_grads)} == {jnp.dtype(jnp.float32)}
    assert float(off) < 0.1 * float(norm)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_only_matrices_decay(layers):
    """Without a gradient nothing else moves a weight."""
    model = tiny.make_model("gpt_oss", noise=0.1)
    weights = model.stacked().weights if layers == "scan" else model.weights
    config = settings(learning_rate=0.5, weight_decay=0.25, warmup_steps=0, min_lr_ratio=1.0)
    optimizer = make_optimizer(model.table, weights, config)
    state = init_state(weights, optimizer)
    nothing = jax.tree.map(jnp.zeros_like, state.weights)
    updates, _ = jax.jit(optimizer.update)(nothing, state.opt_state, state.weights)
    moved = jax.tree.map(lambda w, u: np.asarray(w) + np.asarray(u), state.weights, updates)
    moved = unstack_layers(moved) if layers == "scan" else moved
    both = zip(by_slot(model, moved), by_slot(model, model.weights), strict=True)
    for (name, matrix, now), (_, _, then) in both:
        factor = 1 - 0.5 * 0.25 if matrix else 1.0
        np.testing.assert_allclose(now, factor * then, rtol=1e-6, err_msg=name)
