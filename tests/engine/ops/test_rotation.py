"""int8 with rotated inputs: the same product, and outliers that cost little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.nn.storage import Storage
from rooflax.ops import native
from rooflax.ops.format_names import resolve_format
from rooflax.ops.linear import linear, lookup
from rooflax.ops.weights import StackMember, quantize
from rooflax.ops.weights.rotation import BLOCK, butterflies, restore, rotate
from tests.support.models.programs import numbers
from tests.support.ops.calls import by_each
from tests.support.ops.cases import normal

FORMAT = "w8a8-h64"
NATIVE = pytest.mark.skipif(native.load() is None, reason="no native library")
pytestmark = pytest.mark.oldest_jax


def hadamard():
    h = np.ones((1, 1), np.float32)
    while len(h) < BLOCK:
        h = np.block([[h, h], [h, -h]])
    return h


def with_outliers(rows, inner):
    x = normal(rows, inner)
    x[:, 5] *= 60
    return x


def test_a_block_is_multiplied_by_a_hadamard_matrix():
    x = normal(3, 128)
    wanted = (x.reshape(-1, BLOCK) @ hadamard()).reshape(x.shape)
    np.testing.assert_allclose(butterflies(x, np), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(restore(rotate(x)), x, rtol=1e-5, atol=1e-6)


@NATIVE
@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_every_kernel_rotates_to_the_same_bits(name):
    before = native.instruction_set()
    if not native.force_instruction_set(name):
        pytest.skip(f"no {name} here")
    try:
        x = with_outliers(7, 192)
        by_library = native.rotator()
        assert by_library is not None
        np.testing.assert_array_equal(by_library(x), butterflies(x, np))
        np.testing.assert_array_equal(by_library(x), np.asarray(butterflies(jnp.asarray(x), jnp)))
    finally:
        native.force_instruction_set(before)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_outliers_cost_little(rows):
    """One scale a row and no rotation is several times worse."""
    x, w = with_outliers(rows, 256), normal(256, 48, seed=1)
    exact = x.astype(np.float64) @ w

    def errors(format):
        found = by_each(linear, (None, "reference"))(x, quantize(w, format, (256,), (48,)))
        return [float(np.sqrt(np.mean((np.asarray(y) - exact) ** 2))) for y in found]

    ours, reference = errors(FORMAT)
    assert 3 * ours < errors("w8a8")[0]
    assert reference == pytest.approx(ours, rel=0.05)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_kernels_and_xla_agree(rows):
    w = normal(3, 192, 37, seed=1)
    stack = quantize(w, FORMAT, (192,), (37,))
    x, each = normal(rows, 192), by_each(linear, (None, "xla", "reference"))
    for index in range(3):
        found = each(x, StackMember(stack, jnp.int32(index)))
        for one in found[1:]:
            np.testing.assert_allclose(found[0], one, rtol=1e-3, atol=1e-2)
        exact = x @ w[index]
        np.testing.assert_allclose(found[0], exact, atol=0.05 * np.abs(exact).max())


def test_weights_are_within_a_step_and_looked_up():
    w = normal(128, 40)
    packed = quantize(w, FORMAT, (128,), (40,))
    found = np.asarray(numbers(packed))
    assert np.abs(found - w).max() < np.abs(w).max() / 30
    table = np.asarray(jax.jit(lookup)(packed, np.arange(40)))
    np.testing.assert_allclose(table, found.T, rtol=1e-6, atol=1e-6)
    plain = jax.tree.map(jnp.asarray, packed.restored())
    np.testing.assert_allclose(np.asarray(numbers(plain)), found, atol=0.03)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_shows(value):
    w, x = normal(128, 20), normal(2, 128)
    w[3, 7] = value
    (y,) = map(np.asarray, by_each(linear, (None,))(x, quantize(w, FORMAT, (128,), (20,))))
    assert np.isnan(y[:, 7]).all() and np.isfinite(np.delete(y, 7, axis=1)).all()
    x[0, 3] = value
    weight = quantize(normal(128, 20), FORMAT, (128,), (20,))
    (y,) = map(np.asarray, by_each(linear, (None,))(x, weight))
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_int8_is_rotated_where_blocks_fit():
    assert resolve_format("int8") == FORMAT
    assert resolve_format("int4+head=int8") == f"iq4_nl+head={FORMAT}"
    with pytest.raises(RequestError, match="w8a8-h64"):
        resolve_format("int9")
    assert Storage("float32", FORMAT).quantizes_activations
