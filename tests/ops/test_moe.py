"""Routing and experts for every implementation and method, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.moe import experts, route
from tests.ops.cases import MOE

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


@functools.cache
def jitted(implementation, method):
    return jax.jit(
        functools.partial(
            experts, activation=clamped_swiglu, method=method, implementation=implementation
        )
    )


@pytest.mark.parametrize("case", MOE, ids=lambda c: c.name)
def test_experts(case):
    x, logits, weights = case.arrays()
    ids, shares = route(jnp.asarray(logits), case.chosen)
    exact = by_hand(x, np.asarray(ids), np.asarray(shares), *weights)
    for implementation in ("reference", "xla", None):
        for method in METHODS:
            out = jitted(implementation, method)(x, ids, shares, *weights)
            assert out.dtype == jnp.float32
            np.testing.assert_allclose(out, exact, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("case", MOE, ids=lambda c: c.name)
def test_route_takes_the_top_and_shares_among_them_alone(case):
    logits = case.arrays()[1]
    ids, shares = (np.asarray(a) for a in route(jnp.asarray(logits), case.chosen))
    order = np.argsort(-logits, axis=1, kind="stable")[:, : case.chosen]  # ties: the lower id
    np.testing.assert_array_equal(ids, order)
    top = np.take_along_axis(logits, order, axis=1).astype(np.float64)
    wanted = np.exp(top) / np.exp(top).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(method):
    x, logits, weights = MOE[1].arrays()
    ids, shares = route(jnp.asarray(logits), MOE[1].chosen)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, *weights)]
    out = jitted("xla", method)(narrow[0], ids, shares, *narrow[1:])
    assert out.dtype == jnp.bfloat16
    wide = [np.asarray(a).astype(np.float32) for a in narrow]
    exact = by_hand(wide[0], np.asarray(ids), np.asarray(shares), *wide[1:])
    scale = np.abs(exact).max()
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0, atol=0.03 * scale)


def test_the_same_token_gives_the_same_output_bit_for_bit_in_any_company():
    """On CPU a token's output does not depend on who else is in the batch."""
    case = next(c for c in MOE if c.name == "many tokens")
    x, logits, weights = case.arrays()
    ids, shares = route(jnp.asarray(logits), case.chosen)
    together = np.asarray(jitted("xla", "per_token")(x, ids, shares, *weights))
    half = np.asarray(jitted("xla", "per_token")(x[::2], ids[::2], shares[::2], *weights))
    np.testing.assert_array_equal(together[::2], half)


def test_the_chosen_implementation_is_that_one_or_an_error():
    x, logits, weights = MOE[0].arrays()
    ids, shares = route(jnp.asarray(logits), MOE[0].chosen)
    arrays = [jnp.asarray(a) for a in weights]
    with pytest.raises(NotImplementedError, match="experts has no 'native'"):
        experts(
            jnp.asarray(x), ids, shares, *arrays, activation=clamped_swiglu,
            implementation="native",
        )  # fmt: skip
