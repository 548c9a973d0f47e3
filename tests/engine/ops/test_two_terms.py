"""Activations of two int8 numbers each: near those that are kept, and each row by itself."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.format_names import KNOWN, of_two_terms
from rooflax.ops.linear import Activation, Norm, cpu, linear
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import StackMember, quantize
from tests.engine.ops.test_blocks import CLASSES, drawn, packed
from tests.support.ops.calls import calls_of, same_alone

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(not native.is_ready(), reason=native.status().reason),
]

NAMES = ("w8a8-g32", "w4a8", "q4_1", "q6_k", "q2_k")
"""One of each kernel's ways with a group: a scale, a minimum, two parts, shared float16s."""
ROWS = (1, 3, 4, 5, 8, 9, 16, 33)

product = jax.jit(partial(linear, bias=None, implementation="native"))
selected = jax.jit(lambda x, w, select: cpu.selected_matmul(LinearArgs(x, w, None), select))


def weight(name, inner, outer, *stack):
    if name in ("w8a8-g32", "w4a8"):
        numbers = np.random.default_rng(1).standard_normal((*stack, inner, outer))
        return jax.tree.map(
            jnp.asarray, quantize(numbers.astype(np.float32), name, (inner,), (outer,))
        )
    kind = next(kind for kind, cls in CLASSES.items() if cls.blocks[kind] == name)
    return packed(kind, *drawn(kind, inner, *stack, outer=outer)[:2])


def with_outliers(rows, inner, seed=0):
    """Rows whose groups have one input a hundred times as large as the others."""
    x = np.random.default_rng(seed).standard_normal((rows, inner))
    x[:, ::32] *= 100
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_nearly_those_of_activations_that_are_kept(instruction_set, name):
    w = weight(name, 512, 53)
    two, x = replace(w, format=of_two_terms(name)), with_outliers(ROWS[-1], 512)
    exact = np.asarray(x, np.float64) @ np.asarray(w.numbers(), np.float64)
    once = np.abs(np.asarray(product(x, w)) - exact).max()
    rounded = np.asarray(two.activations(x), np.float64) @ np.asarray(w.numbers(), np.float64)
    for found in map(np.asarray, calls_of(linear, ROWS)(x, two, None)):
        assert np.abs(found - exact[: len(found)]).max() < once / 50
        near = 1e-5 * np.abs(exact).max()  # one that lies between two steps may go to either
        np.testing.assert_allclose(found, rounded[: len(found)], rtol=0, atol=near)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_rows_beside_it(instruction_set, name):
    """Bit for bit, wide enough to be shared among threads."""
    two = replace(weight(name, 256, 1000), format=of_two_terms(name))
    same_alone(linear, ROWS, with_outliers(ROWS[-1], 256, seed=7), two, None)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_before_and_behind_is_part_of_it(name):
    """A norm or a gate, a bias and a residual, as in float32 around it."""
    two = replace(weight(name, 64, 53), format=of_two_terms(name))
    rng = np.random.default_rng(3)
    x, both = with_outliers(5, 64), with_outliers(5, 128).reshape(5, 2, 64)
    bias, scale = (jnp.asarray(rng.standard_normal(n), jnp.float32) for n in (53, 64))
    residual = jnp.asarray(rng.standard_normal((5, 53)), jnp.float32)
    for rows, prologue in ((x, Norm(scale, None, 1e-6)), (both, Activation("silu", gated=True))):
        found, wanted = (
            linear(
                rows, two, bias, residual=residual, prologue=prologue, implementation=implementation
            )
            for implementation in ("native", "reference")
        )
        near = 2e-4 * float(jnp.abs(wanted).max())
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=near)


@pytest.mark.parametrize("name", NAMES)
def test_experts_and_layers_are_read_where_they_lie(name):
    """One of a stack, and rows with experts of their own, have the bits of each weight alone."""
    stack = replace(weight(name, 64, 64, 3), format=of_two_terms(name))
    x = with_outliers(11, 64, seed=1)
    members = [stack.member(i) for i in range(3)]
    for i, member in enumerate(members):
        found = product(x, StackMember(stack, jnp.int32(i)))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(product(x, member)))
    select = jnp.asarray([0, 2, 1, 1, 0, 2, 2, 2, 1, 0, 2], jnp.int32)
    found = np.asarray(selected(x, stack, select))
    for row, member in enumerate(np.asarray(select)):
        wanted = product(x[row : row + 1], members[member])
        np.testing.assert_array_equal(found[row], np.asarray(wanted)[0])


def test_a_name_for_each_format_of_files():
    twos = {name: format for name, format in KNOWN.items() if format.num_terms == 2}
    assert {of_two_terms(name) for name in ("w8a8-g32", "w4a8", "q4_k", "iq4_xs")} <= twos.keys()
    assert all(format.quantizes_activations for format in twos.values())
