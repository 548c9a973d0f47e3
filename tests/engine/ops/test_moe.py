"""Routing and experts for every implementation and method, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.ops import native
from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.format_names import FORMATS
from rooflax.ops.linear import ClampedSwiglu
from rooflax.ops.moe import experts, route
from rooflax.ops.weights import quantize
from tests.marks import cases
from tests.support.ops.calls import by_each
from tests.support.ops.cases import MOE

pytestmark = pytest.mark.oldest_jax

METHODS = ["grouped", "per_token", "dense"]


def swiglu(gate_up, alpha=1.702, limit=7.0):
    gate = np.minimum(gate_up[0], limit)
    up = np.clip(gate_up[1], -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def by_hand(x, ids, shares, gate_up, gate_up_bias, down, down_bias):
    out = np.zeros(x.shape, np.float64)
    for t, j in np.ndindex(ids.shape):
        e = ids[t, j]
        h = np.einsum("d,dcf->cf", x[t].astype(np.float64), gate_up[e]) + gate_up_bias[e]
        out[t] += shares[t, j] * (swiglu(h) @ down[e] + down_bias[e])
    return out


routed = jax.jit(route, static_argnums=1, static_argnames=("renormalise", "scale", "groups"))


@jax.jit
def every_way(x, ids, shares, *weights):
    """By every implementation and method, in one program."""
    return [
        experts(
            x, ids, shares, *weights, activation=clamped_swiglu, method=method,
            implementation=implementation,
        )
        for implementation in ("reference", "xla", None)
        for method in METHODS
    ]  # fmt: skip


@functools.cache
def jitted(implementation, method):
    return jax.jit(
        functools.partial(
            experts, activation=clamped_swiglu, method=method, implementation=implementation
        )
    )


@pytest.mark.parametrize(
    "case",
    cases(
        MOE,
        nightly=[
            "all tokens the same experts",
            "experts without a token",
            "more experts than pairs",
            "ties",
        ],
        every_jax=["one token", "many tokens", "one chosen"],
    ),
    ids=lambda c: c.name,
)
def test_experts(case):
    x, logits, weights = case.arrays()
    ids, shares = routed(jnp.asarray(logits), case.chosen)
    exact = by_hand(x, np.asarray(ids), np.asarray(shares), *weights)
    for out in every_way(x, ids, shares, *weights):
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("case", MOE, ids=lambda c: c.name)
def test_route_takes_the_top_and_shares_among_them_alone(case):
    logits = case.arrays()[1]
    ids, shares = (np.asarray(a) for a in routed(jnp.asarray(logits), case.chosen))
    order = np.argsort(-logits, axis=1, kind="stable")[:, : case.chosen]  # ties: the lower id
    np.testing.assert_array_equal(ids, order)
    top = np.take_along_axis(logits, order, axis=1).astype(np.float64)
    wanted = np.exp(top) / np.exp(top).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_the_best_groups_alone(biased):
    """A group counts by its largest share, or by its two largest with their biases; below zero, as
    biases may make them, those of other groups do not come back."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, 12)).astype(np.float32)
    bias = rng.standard_normal(12).astype(np.float32) - 2 if biased else None
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)
    if biased:
        shares = 1 / (1 + np.exp(-logits.astype(np.float64)))
    scores = shares + bias if biased else shares
    best = np.sort(scores.reshape(40, 4, 3), axis=2)[:, :, -2 if biased else -1 :].sum(axis=2)
    kept = np.argsort(-best, axis=1)[:, :2]
    masked = np.full_like(scores, -np.inf)
    for row, groups in enumerate(kept):
        for group in groups:
            masked[row, 3 * group : 3 * group + 3] = scores[row, 3 * group : 3 * group + 3]
    wanted = np.argsort(-masked, axis=1)[:, :5]
    how = {"bias": None if bias is None else jnp.asarray(bias), "renormalise": False, "scale": 1.5}
    ids, weights = routed(jnp.asarray(logits), 5, **how, groups=(4, 2))
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, 1.5 * np.take_along_axis(shares, wanted, 1), rtol=1e-5)
    plain = np.asarray(routed(jnp.asarray(logits), 5, **how)[0])
    assert (plain != wanted).any()
    np.testing.assert_array_equal(routed(jnp.asarray(logits), 5, **how, groups=(4, 4))[0], plain)


def test_without_biases_and_without_renormalising():
    """As experts of Qwen3-MoE may be; the shares sum to less than 1."""
    case = MOE[1]
    x, logits, (gate_up, _, down, _) = case.arrays()
    ids, shares = routed(jnp.asarray(logits), case.chosen, renormalise=False)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    wanted = np.take_along_axis(p, np.asarray(ids), axis=1)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)
    assert (np.asarray(shares).sum(axis=1) < 1).all()
    zeros = np.zeros((len(gate_up), *gate_up.shape[2:])), np.zeros((len(down), x.shape[1]))
    exact = by_hand(x, np.asarray(ids), np.asarray(shares), gate_up, zeros[0], down, zeros[1])
    for out in every_way(x, ids, shares, gate_up, None, down, None):
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(method):
    x, logits, weights = MOE[1].arrays()
    ids, shares = routed(jnp.asarray(logits), MOE[1].chosen)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, *weights)]
    out = jitted("xla", method)(narrow[0], ids, shares, *narrow[1:])
    assert out.dtype == jnp.bfloat16
    wide = [np.asarray(a).astype(np.float32) for a in narrow]
    exact = by_hand(wide[0], np.asarray(ids), np.asarray(shares), *wide[1:])
    scale = np.abs(exact).max()
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0, atol=0.03 * scale)


@pytest.mark.every_jax
def test_the_same_token_gives_the_same_output_bit_for_bit_in_any_company():
    """On CPU a token's output does not depend on who else is in the batch."""
    case = next(c for c in MOE if c.name == "many tokens")
    x, logits, weights = case.arrays()
    ids, shares = routed(jnp.asarray(logits), case.chosen)
    together = np.asarray(jitted("xla", "per_token")(x, ids, shares, *weights))
    half = np.asarray(jitted("xla", "per_token")(x[::2], ids[::2], shares[::2], *weights))
    np.testing.assert_array_equal(together[::2], half)


def test_the_chosen_implementation_is_that_one_or_an_error():
    x, logits, weights = MOE[0].arrays()
    ids, shares = routed(jnp.asarray(logits), MOE[0].chosen)
    arrays = [jnp.asarray(a) for a in weights]
    with pytest.raises(RequestError, match="experts's 'pallas' cannot run: .* runs on cpu"):
        experts(
            jnp.asarray(x), ids, shares, *arrays, activation=clamped_swiglu,
            implementation="pallas",
        )  # fmt: skip


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@pytest.mark.parametrize("format", cases(FORMATS, nightly=["w8a16", "w8a16-g32", "w8a8-g32"]))
@pytest.mark.parametrize("tokens", cases([1, 3, 40], default=[1]))
def test_quantised_experts(format, tokens):
    """A stack of packed weights: every implementation rounds what the format rounds."""
    rng = np.random.default_rng(tokens)
    x, logits = (rng.standard_normal((tokens, n)).astype(np.float32) for n in (64, 5))
    ids, shares = routed(jnp.asarray(logits), 2)
    gate_up, down = (
        quantize(rng.standard_normal((5, *shape)).astype(np.float32) / 8, format, *split)
        for shape, split in (((64, 2, 32), ((64,), (2, 32))), ((32, 64), ((32,), (64,))))
    )
    biases = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 2, 32), (5, 64))]
    arrays = (jnp.asarray(x), ids, shares, gate_up, biases[0], down, biases[1])
    names = ("reference", "xla", "native")
    outs = by_each(experts, names, activation=ClampedSwiglu())(*arrays)
    for out in map(np.asarray, outs[1:]):
        # A rounding that falls the other way moves an output by a step of its row.
        close = np.isclose(out, outs[0], rtol=1e-4, atol=2e-4)
        assert close.mean() > 0.97
        np.testing.assert_allclose(out, outs[0], atol=0.05)


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
def test_the_native_kernel_only_groups_and_a_token_is_alone():
    case = next(c for c in MOE if c.name == "many tokens")
    x, logits, weights = case.arrays()
    ids, shares = routed(jnp.asarray(logits), case.chosen)
    run = jitted("native", "grouped")
    together = np.asarray(run(x, ids, shares, *weights))
    np.testing.assert_array_equal(
        together[3:4], np.asarray(run(x[3:4], ids[3:4], shares[3:4], *weights))
    )
    with pytest.raises(RequestError, match="moe=dense"):
        jitted("native", "dense")(x, ids, shares, *weights)


@pytest.mark.parametrize(
    ("num_experts", "chosen"), cases([(5, 3), (8, 4), (32, 4), (128, 1)], default=[(128, 1)])
)
def test_shares_are_the_same_bits_among_any_number_of_tokens(num_experts, chosen):
    logits = np.random.default_rng(0).standard_normal((40, num_experts)).astype(np.float32) * 3

    def shares(rows):
        return np.asarray(routed(rows, chosen)[1])

    whole = shares(logits)
    assert whole.shape == (40, chosen)
    for size in (1, 3, 8, 13):
        parts = [shares(logits[i : i + size]) for i in range(0, len(logits), size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
