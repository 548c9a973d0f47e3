"""The native kernels reject indices outside the arrays they were given, and leave padding alone.

What tools/fuzz_ffi.cc draws at random, a few of each here, through jax.jit.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.nn.batch import NO_SLOT
from rooflax.ops import native, sampling_columns
from rooflax.ops.attention import AttentionArgs, Sequences, ragged_attention
from rooflax.ops.cache_write import cache_write
from rooflax.ops.linear import Activation, cpu, linear
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.sampling import ARGMAX, SAMPLE, TokenCounts
from rooflax.ops.weights import as_operand

pytestmark = [
    pytest.mark.skipif(not native.is_ready(), reason=native.status().reason),
    pytest.mark.oldest_jax,
]

SOURCES = Path(__file__).parents[3] / "csrc"
STRANGE = [-1, -(2**31), 2**31 - 1]


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def rejects(sentence, call, *args, **kwargs):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"rooflax {re.escape(sentence)}"):
        jax.block_until_ready(jax.jit(call)(*args, **kwargs))


@pytest.mark.parametrize("index", [5, *STRANGE])
def test_rows_of_a_table(index):
    table = jnp.ones((5, 8))
    rejects("rows: an index outside the table", cpu.rows, table, ints(0, index))
    cpu.rows(table, ints(0, index), ints(1)[0])  # padding is not looked at


@pytest.mark.parametrize("count", [3, *STRANGE])
def test_numbers_of_rows(count):
    x, number = jnp.ones((2, 8)), ints(count)[0]
    rejects("rows: number of rows", cpu.rows, x, ints(0, 1), number)
    rejects("argmax: number of rows", partial(ARGMAX, "native"), x, number)
    call = partial(linear, implementation="native")
    rejects("matmul: number of rows", call, x, jnp.ones((8, 4)), num_rows=number)


@pytest.mark.parametrize("member", [3, *STRANGE])
@pytest.mark.parametrize("rows", [1, 2])
def test_members_of_a_stack(rows, member):
    def call(x, w, select):
        return cpu.selected_matmul(LinearArgs(x, as_operand(w, stack=1)), select)

    x, w = jnp.ones((rows, 8)), jnp.ones((3, 8, 4))
    select = ints(*[0] * (rows - 1), member)
    rejects("matmul: an index outside the stack of w", call, x, w, select)


def test_a_gate_belongs_to_an_activation():
    """The gate's other half would be read behind the row."""
    call = jax.ffi.ffi_call("rooflax_matmul", jax.ShapeDtypeStruct((1, 4), jnp.float32))
    none = (
        jnp.zeros(0),
        jnp.zeros(0, jnp.int32),
        *[jnp.zeros(0)] * 4,
        *[jnp.zeros(0, jnp.int32)] * 2,
    )
    zero = np.float32(0)
    for before, gated in ((7, 0), (0, 1), (1, 1)):
        attributes = {"before": np.int64(before), "gated": np.int64(gated)}
        with pytest.raises(jax.errors.JaxRuntimeError, match="rooflax matmul: what comes before"):
            call(
                jnp.ones((1, 8)), jnp.ones((8, 4)), *none, layout=np.int64(0), eps=zero, alpha=zero,
                limit=zero, bytes=np.int64(0), narrow=np.int64(0), **attributes,
            )  # fmt: skip
    x, w, gate = jnp.ones((1, 2, 8)), jnp.ones((8, 4)), Activation("silu", True)
    assert linear(x, w, prologue=gate, implementation="native").shape == (1, 4)


@pytest.mark.parametrize("slot", [12, NO_SLOT - 1, -1, -(2**31)])
def test_slots_of_a_cache(slot):
    def call(pool, new, slots):
        return cache_write(pool, new, slots, implementation="native")

    pool, new = jnp.zeros((3, 2, 4, 8)), jnp.ones((2, 2, 8))
    rejects("cache write: a slot outside the pool", call, pool, new, ints(0, slot))


def test_slots_of_padding():
    source = (SOURCES / "ffi_common.h").read_text(encoding="utf-8")
    found = re.search(r"kNoSlot = int64_t\{1\} << (\d+);", source)
    assert found is not None and 1 << int(found.group(1)) == NO_SLOT
    pool, new = jnp.zeros((3, 2, 4, 8)), jnp.ones((4, 2, 8))
    slots = ints(NO_SLOT, 5, NO_SLOT + 12, 2**31 - 1)
    written = np.asarray(cache_write(pool, new, slots, implementation="native"))
    assert (written[1, :, 1] == 1).all() and written.sum() == 2 * 8


ATTENTION = {
    "block_tables": [[2, 0]], "first_positions": [0], "query_starts": [0], "query_lens": [2],
    "positions": [4], "context_lens": [6],
}  # fmt: skip
BAD_ATTENTION = [
    *[("a block outside the pool", {"block_tables": [[2, bad]]}) for bad in (3, *STRANGE)],
    *[("queries outside the list of tokens", {"query_starts": [bad]}) for bad in (2, *STRANGE)],
    *[("queries outside the list of tokens", {"query_lens": [bad]}) for bad in (4, *STRANGE)],
    ("a position", {"first_positions": [-1]}),
    ("a position", {"positions": [-1]}),
    ("a context longer than its block table", {"positions": [7], "context_lens": [9]}),
]


def attend(window=None, bias=None, **changes):
    arrays = {name: jnp.asarray(value, jnp.int32) for name, value in (ATTENTION | changes).items()}
    q, pool = jnp.ones((3, 2, 16)), jnp.ones((3, 1, 4, 16))
    sequences = Sequences(**arrays, longest=3)
    call = partial(ragged_attention, implementation="native")
    return call, q, pool, pool, sequences, AttentionArgs(1.0, window, bias=bias)


@pytest.mark.parametrize(("sentence", "changes"), BAD_ATTENTION)
def test_attention(sentence, changes):
    rejects(f"attention: {sentence}", *attend(**changes))


@pytest.mark.parametrize("reach", [0, 4])
def test_distances_without_a_bias(reach):
    call, *args = attend(bias=jnp.ones((2, 11)))
    np.testing.assert_allclose(jax.jit(call)(*args)[:2], 1.0, atol=1e-6)
    rejects("attention: a distance that has no bias", *attend(bias=jnp.ones((2, 2 * reach + 1))))


def test_a_window_behind_the_context():
    """Queries that see nothing read no table: its entries behind the context are anything."""
    changes = {"positions": [100], "context_lens": [6], "query_lens": [3]}
    call, *args = attend(window=4, **changes)
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(*args)), 0)
    changes = {"positions": [2**31 - 9], "context_lens": [6]}
    call, *args = attend(window=4, **changes)
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(*args))[:2], 0)


@pytest.mark.parametrize("slot", [2, *STRANGE])
def test_slots_of_the_sampler(slot):
    params = jnp.asarray(sampling_columns.empty(2))
    counts = TokenCounts(jnp.zeros((2, 40), bool), jnp.zeros((2, 40), jnp.int32))

    def call(logits, slots, num_rows):
        given = (logits, params, ints(0, 0), counts, slots, None, None, num_rows)
        found = SAMPLE("native", *given)
        return found.tokens

    logits = jnp.zeros((2, 40)).at[:, 7].set(9)
    rejects("sample: a slot that is not there", call, logits, ints(0, slot), None)
    rejects("sample: number of rows", call, logits, ints(0, 0), ints(3)[0])
    tokens = jax.jit(call)(logits, ints(0, slot), ints(1)[0])  # of padding nothing is read
    assert np.asarray(tokens)[1] == 0


@pytest.mark.parametrize("numbers", [[2**31 - 1, 1], [-1, 0], [5, -1], [1, 2, 3]])
def test_mask_exchanges_of_the_sampler(numbers):
    params = jnp.asarray(sampling_columns.empty(2))
    counts = TokenCounts(jnp.zeros((2, 40), bool), jnp.zeros((2, 40), jnp.int32))
    masks = jnp.zeros((2, 2), jnp.int32)

    def call(logits, exchange):
        more = (ints(0, 0), counts, ints(0, 1), masks, None, None)
        return SAMPLE("native", logits, params, *more, exchange=exchange).tokens

    rejects("sample: a mask exchange", call, jnp.zeros((2, 40)), ints(*numbers))
