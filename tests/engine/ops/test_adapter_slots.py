"""Adapters in slots: each row gets its own, and what it gets alone, to the bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.linear import Activation, Norm, linear
from rooflax.ops.linear.adapter_slots import LANES, AdapterSlots, places
from rooflax.ops.weights import StackMember, as_operand

IN, RANK, SLOTS = 200, 5, 3
SPANS = ((0, 40, 1), (40, 21, 0), (70, 64, 1))
OUT = 140
"""Outputs 61 to 69 and the last six have no adapter."""
PANELS = sum(-(-count // LANES) for _, count, _ in SPANS)
ROWS = np.array([2, 0, 1, 3, 2, 2, 0, 1, 3, 3, 3, 2], np.int32)

pytestmark = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def slots(dtype, *stack):
    a = normal(*stack, SLOTS, IN, LANES, seed=1).astype(dtype)
    b = normal(*stack, SLOTS, PANELS, RANK, LANES, seed=2).astype(dtype)
    base = normal(*stack, IN, OUT, seed=3)
    return AdapterSlots(base, a, b, (IN,), (OUT,), SPANS)


def product(w, x, rows, **how):
    return np.asarray(linear(x, replace(w, rows=jnp.asarray(rows)), **how))


def as_written(w, x, row):
    """x W + (x A) B of one row, output by output, in float64."""
    y = np.asarray(x, np.float64) @ np.asarray(w.base, np.float64)
    if row:
        few = np.asarray(x, np.float64) @ np.asarray(w.a[row - 1], np.float64)
        b, panel = np.asarray(w.b[row - 1], np.float64), 0
        for first, count, part in SPANS:
            for n in range(count):
                column = b[panel + n // LANES, :, n % LANES]
                y[first + n] += few[part * RANK : (part + 1) * RANK] @ column
            panel += -(-count // LANES)
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_each_row_has_its_own(instruction_set, implementation, dtype):
    w, x = slots(dtype), normal(len(ROWS), IN)
    found = product(w, x, ROWS, implementation=implementation)
    for one, row, y in zip(x, ROWS, found, strict=True):
        np.testing.assert_allclose(y, as_written(w, one, row), atol=2e-3)


@pytest.mark.parametrize(
    "prologue", [None, Norm(normal(IN)), Norm(normal(IN), normal(IN)), Activation("silu", True)]
)
def test_a_row_is_what_it_is_alone(instruction_set, prologue):
    """Beside others, beside hundreds, and without an adapter as without any."""
    gated = getattr(prologue, "gated", False)
    shape, how = ((2, IN) if gated else (IN,)), {"prologue": prologue, "implementation": "native"}
    w, x = slots("float32"), normal(300, *shape)
    rows = np.resize(ROWS, 300)
    together, plain = product(w, x, rows, **how), np.asarray(linear(x, w.base, **how))
    few = product(w, x[:12], rows[:12], **how)
    np.testing.assert_array_equal(few, together[:12])
    for i in (0, 1, 2, 3, 299):
        alone = product(w, x[i : i + 1], rows[i : i + 1], **how)
        np.testing.assert_array_equal(alone[0], together[i])
    np.testing.assert_array_equal(together[rows == 0], plain[rows == 0])
    assert (together[rows > 0] != plain[rows > 0]).any(1).all()
    by_xla = product(w, x, rows, **(how | {"implementation": "xla"}))
    np.testing.assert_allclose(together, by_xla, atol=2e-3)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_a_layer_of_stacked_ones(implementation):
    whole = slots("bfloat16", 2)
    stacked = replace(whole, base=as_operand(whole.base, stack=1))
    how = {
        "implementation": implementation,
        "prologue": Norm(StackMember(normal(2, IN), jnp.int32(1))),
    }
    x = normal(len(ROWS), IN)
    found = jax.jit(lambda i: linear(x, replace(stacked, rows=jnp.asarray(ROWS)).at(i), **how))(1)
    base, a, b = jax.tree.map(lambda leaf: leaf[1], (whole.base, whole.a, whole.b))
    own = AdapterSlots(base, a, b, (IN,), (OUT,), SPANS)
    wanted = product(own, x, ROWS, **(how | {"prologue": Norm(normal(2, IN)[1])}))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_bfloat16_rows(implementation):
    w, x = slots("float32"), normal(len(ROWS), IN).astype(jnp.bfloat16)
    w = replace(w, base=w.base.astype(jnp.bfloat16))
    found = product(w, x, ROWS, implementation=implementation)
    plain = np.asarray(linear(x, w.base, implementation=implementation))
    assert found.dtype == jnp.bfloat16
    wanted = np.stack([as_written(w, one, row) for one, row in zip(x, ROWS, strict=True)])
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=2e-2, atol=0.5)
    np.testing.assert_array_equal(found[ROWS == 0], plain[ROWS == 0])


def test_padding_stays_as_it_is():
    """Rows behind the real ones may name no slot at all."""
    w, x = slots("float32"), normal(4, IN)
    rows = np.array([1, 2, 99, -5], np.int32)
    found = product(w, x, rows, num_rows=jnp.int32(2), implementation="native")
    np.testing.assert_array_equal(found[:2], product(w, x, ROWS[[2, 0, 1, 1]])[:2])
    w = replace(w, rows=jnp.asarray(rows))
    with pytest.raises(jax.errors.JaxRuntimeError, match="adapters: a slot that is none"):
        jax.jit(lambda x: linear(x, w, implementation="native"))(x).block_until_ready()


def test_places_of_outputs():
    found = places(SPANS, OUT)
    assert found[39] == 39 and found[40] == 48 and found[70] == 80
    assert set(found[61:70]) | set(found[134:]) == {PANELS * LANES}
