"""Norms that stand alone: the native kernel gives a row the same bits in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.norm import NORM, norm
from tests.support.ops.calls import by_each

pytestmark = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 5, 20), (300, 64), (1, 2048), (0, 8)])
def test_the_kernel_is_the_formula(instruction_set, shape, centred):
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.standard_normal(dims), jnp.float32)
        for dims in (shape, shape[-1:], shape[-1:])
    )
    bias = bias if centred else None
    wanted, found = by_each(norm, ("reference", "native"), eps=1e-5)(x, weight, bias)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("centred", [False, True])
def test_a_rows_bits_do_not_depend_on_the_other_rows(instruction_set, centred):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1000, 3, 72)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal(72), jnp.float32)
    run = jax.jit(lambda x: norm(x, weight, weight if centred else None, eps=1e-6))
    whole = np.asarray(run(x))
    for begin, end in ((0, 1), (1, 4), (4, 500), (999, 1000)):
        np.testing.assert_array_equal(np.asarray(run(x[begin:end])), whole[begin:end])


def test_bfloat16_stays_bfloat16():
    x = jnp.ones((2, 8), jnp.bfloat16)
    assert norm(x, jnp.ones(8), eps=1e-6, implementation="native").dtype == jnp.bfloat16


def test_sizes_that_do_not_fit_are_rejected():
    with pytest.raises(Exception, match="norm: sizes"):
        jax.block_until_ready(NORM("native", jnp.ones((2, 8)), jnp.ones(7), None, 1e-6))
