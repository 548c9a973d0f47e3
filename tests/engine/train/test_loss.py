"""Cross-entropy by chunks of tokens beside the one that has all logits."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.nn.execution import ExecutionOptions
from rooflax.ops.linear.adapted import Adapted
from rooflax.ops.linear.frozen import Frozen
from rooflax.ops.weights import quantize
from rooflax.train import loss
from rooflax.train.step import init_state, make_train_step
from tests.engine.train.test_step import KEEP_GRADIENT, settings
from tests.marks import cases
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

ROWS, SEQ, WIDTH = 4, 25, 64
OPTIONS = ExecutionOptions(use_cache=False, layers="unrolled", moe="dense", kernels="xla")
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def chunks_of_eight(monkeypatch):
    """100 tokens are 13 chunks then, the last of which is filled up."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    monkeypatch.setattr(loss, "FEWEST_TOKENS", 8)


def capped(model):
    return replace(model, config=replace(model.config, logit_cap=3.0, logit_scale=0.5))


def narrow(model):
    weights = model.weights | {"embed": model.weights["embed"].astype(jnp.bfloat16)}
    return replace(model, weights=weights)


def lora(model):
    """An adapter beside a head of codes."""
    random = np.random.default_rng(3)
    sizes = (WIDTH,), (tiny.VOCAB,)
    codes = quantize(np.asarray(model.weights["lm_head"]).T, "mxfp4-a8", *sizes)
    a, b = (random.normal(size=s).astype(np.float32) for s in ((WIDTH, 2), (2, tiny.VOCAB)))
    base = Frozen(codes, *sizes, is_table=True)
    head = Adapted(base, jnp.asarray(a), jnp.asarray(b), None, *sizes)
    return replace(model, weights=model.weights | {"lm_head": head})


HEADS = {
    "tied": lambda: tiny.make_model("llama", noise=0.1, **SMALL),
    "untied": lambda: tiny.make_model("qwen2", noise=0.1, num_attention_heads=4,
                                      num_key_value_heads=2, **SMALL),
    "with a bias in its norm": lambda: tiny.make_model("gpt2", noise=0.1, n_embd=WIDTH, n_layer=1),
    "capped": lambda: capped(tiny.make_model("llama", noise=0.1, **SMALL)),
    "in bfloat16": lambda: narrow(tiny.make_model("llama", noise=0.1, **SMALL)),
    "with an adapter": lambda: lora(HEADS["untied"]()),
}  # fmt: skip


def arrays():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(ROWS, SEQ, WIDTH)).astype(np.float32)
    targets = random.integers(0, tiny.VOCAB, (ROWS, SEQ)).astype(np.int32)
    mask = random.uniform(size=(ROWS, SEQ)) * (random.uniform(size=(ROWS, SEQ)) < 0.7)
    return hidden, targets, mask.astype(np.float32)


def plain_losses(model, hidden, targets):
    logits = model.logits(hidden, options=OPTIONS)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def trained(model):
    """What changes in training: of an adapter A and B, else the head and its norm."""
    head = model.weights.get("lm_head")
    used = ("embed" if head is None else "lm_head", "final_norm")
    names = [key for key in model.weights if key.startswith(used)]
    if not isinstance(head, Adapted):
        return {name: model.weights[name] for name in names}, lambda new: model.weights | new
    return (
        head.a,
        head.b,
    ), lambda new: model.weights | {"lm_head": replace(head, a=new[0], b=new[1])}


@pytest.mark.parametrize(
    ("head", "nonlinear"),
    cases(
        itertools.product(HEADS, [False, True]),
        nightly=[(head, True) for head in HEADS if head not in ("tied", "capped")],
    ),
)
def test_loss_and_gradients_equal_those_of_all_logits(head, nonlinear):
    model = HEADS[head]()
    hidden, targets, mask = arrays()
    weights, joined = trained(model)

    def total(weights, hidden, chunked):
        own = replace(model, weights=joined(weights))
        if not nonlinear and chunked:
            return loss.cross_entropy_sum(own, hidden, targets, mask, OPTIONS)
        if chunked:
            losses = loss.token_losses(own, hidden, targets, OPTIONS)
        else:
            losses = plain_losses(own, hidden, targets)
        # As preferences have it: a function of sums over rows.
        rows = jnp.sum(mask * losses, axis=1)
        return jnp.sum(jnp.logaddexp(rows, 40.0)) if nonlinear else jnp.sum(rows)

    found = jax.jit(jax.value_and_grad(lambda *a: total(*a, True), argnums=(0, 1)))
    wanted = jax.jit(jax.value_and_grad(lambda *a: total(*a, False), argnums=(0, 1)))
    (value, grads), (other, others) = found(weights, hidden), wanted(weights, hidden)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    np.testing.assert_allclose(total(weights, hidden, True), other, rtol=1e-6)  # none asked for
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        assert a.dtype == b.dtype
        is_rounded = b.dtype == jnp.bfloat16  # each chunk's part of it
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        largest = np.abs(b).max()
        assert largest > 0.01
        # A sum of terms that nearly cancel is rounded as its terms are, not as it is itself.
        off = 0.01 * largest if is_rounded else max(1e-5, 1e-6 * largest)
        np.testing.assert_allclose(a, b, rtol=0 if is_rounded else 1e-5, atol=off)


def test_a_step_has_no_array_of_all_logits():
    model = tiny.make_model("llama", noise=0.1)
    step = make_train_step(model, KEEP_GRADIENT, settings(batch_size=ROWS, seq_len=SEQ))
    state, batch = init_state(model.weights, KEEP_GRADIENT), tiny.random_batch(ROWS, SEQ)
    text = step.lower(state, model.rope, batch).compile().as_text()
    assert f"f32[8,{tiny.VOCAB}]" in text
    for tokens in (ROWS * SEQ, 104):
        assert f"[{tokens},{tiny.VOCAB}]" not in text
    assert f"{SEQ},{tiny.VOCAB}]" not in text
