"""Operations with a state: every backend equals the reference, whatever list the tokens come in."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops.attention.sequences import owners
from rooflax.ops.native import is_ready
from rooflax.ops.recurrent import NO_ROW, DeltaInputs, Runs, causal_conv, delta_rule

HEADS, GROUP, DK, DV, TAPS, ROWS = 3, 2, 10, 37, 4, 12
BACKENDS = ["xla"] + ["native"] * is_ready()
TOLERANCE = 1e-5


owned = jax.jit(owners, static_argnums=2)


def runs(starts, lens, positions, rows, *, snapshots=(), grid=64, tokens=None):
    """Sequences that go on from their rows; of each its snapshots, (tokens, row)."""
    starts, lens, positions, rows = (np.array(x, np.int32) for x in (starts, lens, positions, rows))
    width = max([0, *map(len, snapshots)])
    targets = np.full((len(starts), 1 + width), NO_ROW, np.int32)
    reached = np.zeros_like(targets)
    targets[:, 0], reached[:, 0] = np.where(lens > 0, rows, NO_ROW), lens
    for index, own in enumerate(snapshots):
        for column, (count, row) in enumerate(own, start=1):
            targets[index, column], reached[index, column] = row, count
    size = tokens or int((starts + lens).max())
    owner, offset = owned(starts, lens, size)
    return Runs(
        *map(jnp.asarray, (starts, lens, positions, rows, positions == 0, targets, reached)),
        owner, offset, longest=int(lens.max()), grid=grid,
    )  # fmt: skip


def tokens(count, seed=0):
    state = np.random.RandomState(seed)

    def normal(*shape):
        return state.standard_normal(shape).astype(np.float32)

    g = -np.abs(normal(count, HEADS, GROUP)) * np.float32(0.3)
    beta = 1 / (1 + np.exp(-normal(count, HEADS, GROUP)))
    shape = (count, HEADS, DK)
    return DeltaInputs(normal(*shape), normal(*shape), normal(count, HEADS, GROUP, DV), g, beta)


def pool(seed=1):
    state = np.random.RandomState(seed)
    return state.standard_normal((ROWS, HEADS, GROUP, DK, DV)).astype(np.float32)


ruled, convolve = (
    jax.jit(operation, static_argnames="implementation") for operation in (delta_rule, causal_conv)
)


def run(inputs, states, how, implementation):
    return jax.tree.map(np.asarray, ruled(inputs, states, how, implementation=implementation))


CASES = {
    "decode": runs([0, 1, 2], [1, 1, 1], [5, 0, 63], [3, 7, 1]),
    "decode at the grid": runs([0, 1], [1, 1], [63, 5], [3, 7], snapshots=[[(1, 9)], []]),
    "one prompt": runs([0], [150], [0], [2]),
    "across the grid": runs([0], [150], [37], [2], snapshots=[[(27, 5), (91, 6)]]),
    "ragged": runs([40, 0, 0, 39], [90, 39, 0, 1], [0, 100, 0, 7], [1, 2, 0, 4], tokens=140,
                   snapshots=[[(64, 8)], [(28, 9)], [], []]),
    "drafts": runs([0, 5], [5, 3], [61, 9], [1, 5], grid=1,
                   snapshots=[[(1, 2), (2, 3), (3, 4)], [(1, 6), (2, 7)]]),
}  # fmt: skip


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_every_backend_equals_the_reference(case, implementation):
    how = CASES[case]
    inputs, states = tokens(len(how.owners)), pool()
    wanted = run(inputs, states, how, "reference")
    found = run(inputs, states, how, implementation)
    is_real = (np.asarray(how.offsets) >= 0) & (
        np.asarray(how.offsets) < np.asarray(how.lens)[np.asarray(how.owners)]
    )
    np.testing.assert_allclose(found[0][is_real], wanted[0][is_real], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=TOLERANCE)
    written = {int(row) for row in np.asarray(how.targets).ravel() if row < ROWS}
    for row in set(range(ROWS)) - written:
        np.testing.assert_array_equal(found[1][row], states[row])


def test_the_reference_is_the_recurrence():
    """Written out for one head, in float64."""
    inputs, how = tokens(9), runs([0], [9], [4], [3])
    o, states = run(inputs, pool(), how, "reference")
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    matrix = np.asarray(pool(), np.float64)[3, 1, 1]
    for t in range(9):
        unit_q, unit_k = (x[t, 1] / np.sqrt((x[t, 1] ** 2).sum() + 1e-6) for x in (q, k))
        matrix = np.exp(g[t, 1, 1]) * matrix
        matrix += np.outer(unit_k, beta[t, 1, 1] * (v[t, 1, 1] - matrix.T @ unit_k))
        np.testing.assert_allclose(o[t, 1, 1], matrix.T @ unit_q / DK**0.5, atol=TOLERANCE)
    np.testing.assert_allclose(states[3, 1, 1], matrix, atol=TOLERANCE)


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("cuts", [(1,) * 90, (64, 26), (7, 13, 70), (89, 1)])
def test_native_states_are_the_same_to_the_bit_however_a_prompt_is_cut(cuts):
    inputs, states = tokens(90), pool()
    whole = run(inputs, states, runs([0], [90], [0], [2]), "native")
    begin, out = 0, []
    for count in cuts:
        part = DeltaInputs(*(x[begin : begin + count] for x in inputs))
        o, states = run(part, states, runs([0], [count], [begin], [2]), "native")
        out.append(o)
        begin += count
    np.testing.assert_array_equal(np.concatenate(out), whole[0])
    np.testing.assert_array_equal(states[2], whole[1][2])


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize(
    "change",
    [{"rows": [ROWS]}, {"rows": [-1]}, {"targets": [[ROWS]]}, {"targets": [[-1]]},
     {"starts": [1]}, {"lens": [-1]}],
)  # fmt: skip
def test_no_index_leaves_its_array(change):
    how = runs([0], [5], [3], [2])
    how = replace(how, **{name: jnp.asarray(x, jnp.int32) for name, x in change.items()})
    with pytest.raises(Exception, match="rooflax delta rule"):
        run(tokens(5), pool(), how, "native")


WIDTH = 24


def convolved(x, weight, states, cuts, implementation):
    """A sequence's outputs, cut so, and the pool after them; every state between is kept too."""
    begin, out = 0, []
    for count in cuts:
        kept = [[(k, 5 + k % 2) for k in range(1, count)]]
        how = runs([0], [count], [begin], [2], snapshots=kept, grid=1)
        part = x[begin : begin + count]
        y, states = convolve(part, weight, states, how, implementation=implementation)
        out.append(np.asarray(y))
        begin += count
    return np.concatenate(out), np.asarray(states)


@pytest.fixture
def convolution():
    state = np.random.RandomState(4)
    shapes = (30, 3, WIDTH), (3, WIDTH, TAPS), (ROWS, 3, WIDTH, TAPS - 1)
    return tuple(state.standard_normal(s).astype(np.float32) for s in shapes)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("cuts", [(30,), (1,) * 30, (2, 17, 11)])
def test_a_convolution_goes_on_where_it_was_cut(convolution, cuts, implementation):
    x, weight, states = convolution
    padded = np.concatenate([np.zeros((TAPS - 1, 3, WIDTH), np.float32), x])
    wanted = sum(weight[..., j] * padded[j : j + 30] for j in range(TAPS))
    found, states = convolved(x, weight, states, cuts, implementation)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(states[2], np.moveaxis(x[-TAPS + 1 :], 0, -1))
    before = np.moveaxis(padded[29 : 29 + TAPS - 1], 0, -1)  # what 29 tokens leave
    if cuts == (30,):
        np.testing.assert_array_equal(states[5 + 29 % 2], before)


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize("cuts", [(1,) * 30, (2, 17, 11), (29, 1)])
def test_a_native_convolution_has_the_same_bits_however_it_is_cut(convolution, cuts):
    whole, _ = convolved(*convolution, (30,), "native")
    np.testing.assert_array_equal(convolved(*convolution, cuts, "native")[0], whole)


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
def test_several_sequences_are_convolved_each_for_itself(convolution):
    """One that another's target overwrites goes on from what was there before."""
    x, weight, states = convolution
    how = runs([10, 0], [20, 10], [7, 9], [1, 4], snapshots=[[(3, 4)], []])
    found, wanted = (
        jax.tree.map(np.asarray, convolve(x, weight, states, how, implementation=name))
        for name in ("native", "xla")
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=TOLERANCE)
    rows = [row for row in range(ROWS) if row != 4]  # two targets: either may be last
    np.testing.assert_array_equal(found[1][rows], wanted[1][rows])


@pytest.mark.skipif(not is_ready(), reason="the native library was not built")
@pytest.mark.parametrize(
    "change", [{"rows": [ROWS]}, {"targets": [[-1]]}, {"starts": [1]}, {"lens": [-1]}]
)
def test_no_index_of_a_convolution_leaves_its_array(convolution, change):
    x, weight, states = convolution
    how = runs([0], [30], [3], [2])
    how = replace(how, **{name: jnp.asarray(v, jnp.int32) for name, v in change.items()})
    with pytest.raises(Exception, match="rooflax causal conv"):
        jax.block_until_ready(convolve(x, weight, states, how, implementation="native"))
