"""Norms, RoPE and activations against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops.activation import ACTIVATIONS, clamped_swiglu, gated
from rooflax.ops.norm import layer_norm, rms_norm
from rooflax.ops.rope import apply_rope, rope_rows
from tests.support.ops.cases import normal, rng

DTYPES = [("float32", 3e-6), ("bfloat16", 2e-2)]


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norms(shape, dtype, tolerance):
    x, w, b = normal(*shape) * 3 + 1, normal(7, seed=1), normal(7, seed=2)
    x, w, b = (jnp.asarray(a, jnp.dtype(dtype)) for a in (x, w, b))
    x64, w64, b64 = (np.asarray(a).astype(np.float64) for a in (x, w, b))
    rms = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 0.01) * w64
    centred = x64 - x64.mean(-1, keepdims=True)
    layer = centred / np.sqrt(x64.var(-1, keepdims=True) + 0.01) * w64 + b64
    for got, wanted in (
        (jax.jit(rms_norm, static_argnames="eps")(x, w, eps=0.01), rms),
        (jax.jit(layer_norm, static_argnames="eps")(x, w, b, eps=0.01), layer),
    ):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(
            np.asarray(got).astype(np.float64), wanted, rtol=tolerance, atol=tolerance
        )


def test_norm_of_large_bfloat16_does_not_overflow():
    x = jnp.full((1, 8), 1e30, jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(rms_norm(x / 1e12, jnp.ones(8), eps=1e-5)).astype(np.float32), 1, rtol=1e-2
    )


@jax.jit
def turned_by(x, cos, sin, positions):
    return apply_rope(x, *rope_rows(cos, sin, positions))


@pytest.mark.parametrize("middle", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rope_turns_pairs_by_their_positions_angle(middle, dtype, tolerance):
    head_dim, max_len = 6, 13
    angles = rng(4).uniform(0, 6, (max_len, head_dim // 2)).astype(np.float32)
    positions = rng(5).randint(0, max_len, (2, 4)).astype(np.int32)
    x = jnp.asarray(normal(2, 4, *middle, head_dim), jnp.dtype(dtype))
    table = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    got = turned_by(x, *table, positions)
    assert got.dtype == x.dtype
    x64 = np.asarray(x).astype(np.float64)
    turned = np.zeros(x64.shape)
    for index in np.ndindex(x64.shape[:-1]):
        for i in range(head_dim // 2):
            angle = angles[positions[index[:2]], i]
            a, b = x64[index][i], x64[index][i + head_dim // 2]
            turned[index][i] = a * math.cos(angle) - b * math.sin(angle)
            turned[index][i + head_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), turned, rtol=tolerance, atol=tolerance
    )


BY_HAND = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}
BY_HAND["gelu_pytorch_tanh"] = BY_HAND["gelu_new"]


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations(name):
    x = np.linspace(-6, 6, 41).astype(np.float32)
    wanted = [BY_HAND[name](float(value)) for value in x]
    np.testing.assert_allclose(jax.jit(ACTIVATIONS[name])(x), wanted, rtol=1e-5, atol=1e-6)
    pair = np.stack([x, x[::-1] + 1])[None]
    found = jax.jit(gated, static_argnums=0)(name, pair)
    np.testing.assert_allclose(found[0], wanted * (x[::-1] + 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (0.5, 2.0)])
def test_clamped_swiglu(alpha, limit):
    """The gate is clamped from above only, up on both sides."""
    gate, up = np.meshgrid(np.linspace(-12, 12, 25), np.linspace(-12, 12, 23))
    pair = np.stack([gate.ravel(), up.ravel()]).astype(np.float32)
    g, u = np.minimum(pair[0], limit).astype(np.float64), np.clip(pair[1], -limit, limit)
    wanted = (u + 1) * g / (1 + np.exp(-alpha * g))
    got = clamped_swiglu(jnp.asarray(pair), alpha=alpha, limit=limit)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
