"""y = x @ w for every implementation, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.ops import native
from rooflax.ops.kernels import chosen
from rooflax.ops.linear import linear, linear_by_head, unembed
from rooflax.ops.linear.prologue import Activation, Norm
from rooflax.ops.weights import StackMember, quantize
from tests.support.ops.calls import by_each
from tests.support.ops.cases import LINEAR, normal

IMPLEMENTATIONS = ("reference", "xla", None)


def expected(case, x, w, bias):
    axes = len(case.contracted)
    y = np.tensordot(x.astype(np.float64), w.astype(np.float64), axes=axes)
    return y if bias is None else y + bias


@pytest.mark.parametrize("case", LINEAR, ids=lambda c: c.name)
def test_linear(case):
    x, w, bias = case.arrays()
    for y in by_each(linear, IMPLEMENTATIONS, contract=len(case.contracted))(x, w, bias):
        assert y.shape == (*case.batch, *case.out) and y.dtype == jnp.float32
        np.testing.assert_allclose(y, expected(case, x, w, bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", LINEAR[2:6], ids=lambda c: c.name)
def test_bfloat16_accumulates_in_float32_and_rounds_once(case):
    arrays = [None if a is None else np.asarray(a, jnp.bfloat16) for a in case.arrays()]
    x, w, bias = (None if a is None else a.astype(np.float32) for a in arrays)
    exact = expected(case, x, w, bias)
    for y in by_each(linear, IMPLEMENTATIONS, contract=len(case.contracted))(*arrays):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_activations_over_bfloat16_weights(implementation):
    x, w = normal(3, 5), jnp.asarray(normal(5, 7), jnp.bfloat16)
    y = linear(jnp.asarray(x), w, implementation=implementation)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, x @ np.asarray(w).astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_trained_has_the_kernels_values_and_xlas_gradients(format):
    x, w, table, dy = (jnp.asarray(normal(*shape, seed=n)) for n, shape in enumerate(
        [(9, 48), (48, 40), (40, 48), (9, 40)]))  # fmt: skip
    w, table = (a.astype(format) for a in (w, table))
    kernel = None if format == "float32" else "xla"

    def values(implementation):
        def total(x, w, table):
            y = linear(x, w, implementation=implementation)
            y = y * unembed(x, table, implementation=implementation)
            return jnp.sum(y * dy), y

        graded = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
        (_, y), gradients = jax.jit(graded)(x, w, table)
        return np.asarray(y), [np.asarray(one, np.float32) for one in gradients]

    y, gradients = values("trained")
    plain = linear(x, w, implementation=kernel) * unembed(x, table, implementation=kernel)
    np.testing.assert_array_equal(y, plain)
    for one, other in zip(gradients, values("xla")[1], strict=True):
        bound = 1e-5 if format == "float32" else 2**-7
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound * np.abs(other).max())


@pytest.mark.parametrize("kind", ["rms norm", "layer norm", "gate"])
def test_trained_has_the_sums_of_a_norm_or_an_activation_before(kind):
    weight, shift = (jnp.asarray(normal(48, seed=seed)) for seed in (5, 6))
    prologue = Norm(weight, shift if kind == "layer norm" else None)
    if kind == "gate":
        prologue = Activation("silu", gated=True)
    rows = (9, 2, 48) if kind == "gate" else (9, 48)
    x, w, bias, residual = (
        jnp.asarray(normal(*shape, seed=n))
        for n, shape in enumerate([rows, (48, 40), (40,), (9, 40)])
    )

    def total(x, w, bias, residual, implementation):
        y = linear(x, w, bias, prologue=prologue, residual=residual, implementation=implementation)
        return jnp.sum(jnp.sin(y)), y

    graded = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True), static_argnums=4)
    (_, y), gradients = graded(x, w, bias, residual, "trained")
    np.testing.assert_array_equal(y, linear(x, w, bias, prologue=prologue, residual=residual))
    for one, other in zip(gradients, graded(x, w, bias, residual, "xla")[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unembed_is_float32_and_transposed(dtype):
    x, table = (np.asarray(a, jnp.dtype(dtype)) for a in (normal(2, 3, 5), normal(7, 5, seed=1)))
    exact = x.astype(np.float64) @ table.astype(np.float64).T
    for y in by_each(unembed, IMPLEMENTATIONS)(x, table):
        assert y.shape == (2, 3, 7) and y.dtype == jnp.float32
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "w8a16", "w8a8", "w4a16"])
def test_each_head_has_a_matrix_of_its_own(format):
    """Also as one of a stack of layers, where `linear` of a head's rows gives the same."""
    x, w = normal(2, 3, 5, 64), normal(2, 5, 64, 7, seed=1)
    if format.startswith("w"):
        w = quantize(w, format, (64,), (7,))
    else:
        w = jnp.asarray(w, jnp.dtype(format))
    each, own = by_each(linear_by_head, IMPLEMENTATIONS), member(w, 1)
    found, apart = each(x, StackMember(w, jnp.int32(1))), by_each(heads_apart, IMPLEMENTATIONS)
    for y, same, near in zip(found, each(x, own), apart(x, own), strict=True):
        assert y.shape == (2, 3, 5, 7) and y.dtype == jnp.float32
        np.testing.assert_array_equal(y, same)
        np.testing.assert_allclose(y, near, rtol=1e-5, atol=1e-5)


def member(w, index):
    return w[index] if isinstance(w, jax.Array) else w.member(index)


def heads_apart(x, w, *, implementation):
    """Each by `linear`."""
    each = [
        linear(x[:, :, head], member(w, head), implementation=implementation) for head in range(5)
    ]
    return jnp.stack(each, axis=2)


def test_axes_that_differ_are_rejected_with_both():
    with pytest.raises(ValueError, match=r"\(5,\).*\(6,\)"):
        linear(jnp.zeros((3, 5)), jnp.zeros((6, 7)))
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(5, 4\)"):
        linear(jnp.zeros((3, 4, 5)), jnp.zeros((5, 4, 7)), contract=2)


def test_an_implementation_that_is_not_here_is_rejected_by_name():
    with pytest.raises(RequestError, match="linear's 'pallas' cannot run: .* runs on cpu"):
        linear(jnp.zeros((3, 5)), jnp.zeros((5, 7)), implementation="pallas")
    with pytest.raises(RequestError, match="linear has no 'mosaic' implementation, only reference"):
        unembed(jnp.zeros((3, 5)), jnp.zeros((7, 5)), implementation="mosaic")


def test_without_the_library_xla_is_used_and_native_is_rejected(monkeypatch):
    monkeypatch.setattr(native, "status", lambda: native.Status(False, "it was not built"))
    assert chosen(None) == {"linear": "xla", "attention": "xla", "moe": "xla"}
    assert linear(jnp.ones((3, 5)), jnp.ones((5, 7))).shape == (3, 7)
    with pytest.raises(RequestError, match="'native' cannot run: it was not built"):
        linear(jnp.zeros((3, 5)), jnp.zeros((5, 7)), implementation="native")
