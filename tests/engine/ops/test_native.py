"""The native kernels against their references, for every instruction set that is here."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
from rooflax.ops.format_names import FORMATS
from rooflax.ops.kv_pool import QuantizedPool, tokens_as_fp8, tokens_as_int8
from rooflax.ops.linear import Activation, ClampedSwiglu, Norm, cpu, linear, unembed
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import StackMember, as_operand, quantize
from tests.marks import cases
from tests.support.ops.calls import calls_of, dot, native_call, plain, same_alone

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(not native.is_ready(), reason=native.status().reason),
]

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 30, 37)
"""Among them tiles of 16 that are not whole, one of more than 8 rows and one of fewer."""
FEW = (1, 7, 30)
"""Of these, for what differs in where a product goes."""
SHAPES = [(64, 48), (99, 37), (160, 130)]
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def inputs(rows, inner, outer):
    """The same whatever ran before: between two bytes, a last bit decides which one a value is."""
    rng = np.random.default_rng((rows, inner, outer))
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    w = rng.standard_normal((inner, outer)).astype(np.float32)
    return jnp.asarray(x), w, jnp.asarray(rng.standard_normal(outer).astype(np.float32))


def product(x, w, bias, *, select=None, **how):
    """The kernel's own arguments."""
    w, index = as_operand(w, stack=int(select is not None)).in_stack()
    return cpu.selected_matmul(LinearArgs(x, w, index, bias, **how), select)


def close(found, wanted, tolerance=2e-4):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=tolerance)


def all_close(found, wanted, tolerance=2e-4):
    """Each of `calls_of`, beside the first of all rows."""
    for rows in found:
        close(rows, np.asarray(wanted)[: len(rows)], tolerance)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16"], every_jax=["float32"]))
def test_products(instruction_set, inner, outer, dtype):
    x, w, bias = inputs(ROWS[-1], inner, outer)
    weight, table = jnp.asarray(w, dtype), jnp.asarray(w.T, dtype)
    all_close(calls_of(linear, ROWS)(x, weight, bias), plain(linear)(x, weight, bias))
    all_close(calls_of(linear, FEW)(x, weight, None), plain(linear)(x, weight, None))
    all_close(calls_of(unembed, FEW)(x, table), plain(unembed)(x, table))


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_float32_activations_meet_bfloat16_exactly(instruction_set, rows):
    """The product with a bfloat16 identity is each number itself, all of its bits."""
    x, _, _ = inputs(rows, 72, 1)
    eye = jnp.eye(72, dtype=jnp.bfloat16)
    for operation in (linear, unembed):
        found = native_call(operation)(x, eye)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_norms_rows_are_bfloat16_where_activations_are(instruction_set, rows):
    x, _, _ = inputs(rows, 72, 1)
    norm, eye = Norm(normal(72), eps=1e-3), jnp.eye(72, dtype=jnp.bfloat16)
    rows_of = x.astype(jnp.bfloat16)
    found = native_call(linear)(rows_of, eye, prologue=norm)
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), norm(rows_of).astype(jnp.float32), 0.02)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("inner", "outer"),
    cases([(64, 48), (96, 37), (160, 130)], default=[(96, 37)], every_jax=[(96, 37)]),
)
def test_quantised_products(instruction_set, inner, outer, format):
    x, w, bias = inputs(ROWS[-1], inner, outer)
    packed = quantize(w, format, (inner,), (outer,))
    wanted = np.asarray(dot(packed, x))
    all_close(calls_of(linear, ROWS)(x, packed, bias), wanted + np.asarray(bias))
    all_close(calls_of(unembed, FEW)(x, packed), wanted)


@pytest.mark.parametrize("format", ["w8a8", "w8a16", "fp8-a16"])
def test_inputs_that_are_no_multiple_of_four(instruction_set, format):
    x, w, bias = inputs(20, 67, 40)
    packed = quantize(w, format, (67,), (40,))
    wanted = np.asarray(dot(packed, x)) + np.asarray(bias)
    all_close(calls_of(linear, (1, 5, 20))(x, packed, bias), wanted)


PROLOGUES = {
    "rms": lambda n: Norm(normal(n), eps=1e-3),
    "layer": lambda n: Norm(normal(n), normal(n), eps=1e-3),
    "clamped": lambda _: ClampedSwiglu(),
    **{name: lambda _, name=name: Activation(name) for name in cpu.ACTIVATIONS},
    **{f"gated {name}": lambda _, name=name: Activation(name, True) for name in cpu.ACTIVATIONS},
}


@pytest.mark.parametrize("name", PROLOGUES)
@pytest.mark.parametrize("inner", cases([64, 37], nightly=[64]))
def test_what_comes_before_and_behind(instruction_set, name, inner):
    """A norm or an activation of the rows, bias and residual, for every width of the weights."""
    prologue = PROLOGUES[name](inner)
    gates, rows = getattr(prologue, "gated", False), (1, 3, 11)
    x, w, bias = inputs(rows[-1], 2 * inner if gates else inner, 50)
    x = 3 * np.asarray(x).reshape(rows[-1], *((2, inner) if gates else (inner,)))
    how = {"prologue": prologue, "residual": normal(rows[-1], 50)}
    weight, packed = jnp.asarray(w[:inner]), quantize(w[:inner], "w8a16", (inner,), (50,))
    for kept, tolerance in ((weight, 2e-4), (packed, 1e-3)):
        wanted = plain(linear)(x, kept, bias, **how)
        all_close(calls_of(linear, rows)(x, kept, bias, **how), wanted, tolerance)


@jax.jit
def products(calls):
    """Of each (rows, weights, biases, members), in one program, which compiles sooner."""
    return [product(x, w, bias, select=select) for x, w, bias, select in calls]


@pytest.mark.parametrize("format", cases(["float32", "bfloat16", *FORMATS], every_jax=["float32"]))
def test_members_of_a_stack(instruction_set, format):
    """Each row with its own weights, and all rows with one member's: bit for bit."""
    few, many = (np.asarray(inputs(count, 64, 1)[0]) for count in (7, 60))
    w = RNG.standard_normal((5, 64, 40)).astype(np.float32)
    bias = RNG.standard_normal((5, 40)).astype(np.float32)
    stack = _kept(w, format, 64, 40)
    alone = [(_kept(w[i], format, 64, 40), bias[i], None) for i in range(5)]
    select = np.asarray([3, 0, 3, 4, 0, 0, 1], np.int32)
    # Runs of rows that are multiplied by tiles and others, mixed.
    mixed = RNG.permutation([0] * 3 + [1] * 40 + [4] * 17).astype(np.int32)
    runs = {member: np.flatnonzero(mixed == member) for member in (0, 1, 4)}
    wholes = [
        (few, stack, bias, select),
        (many, stack, bias, mixed),
        (few, stack, bias[2], np.asarray([2], np.int32)),
    ]
    parts = [
        [([row], (few[[row]], *alone[member])) for row, member in enumerate(select)],
        [(rows, (many[rows], *alone[member])) for member, rows in runs.items()],
        [(slice(None), (few, *alone[2]))],
    ]
    calls = [call for each in parts for _, call in each]
    found = products([*wholes, *calls])
    wanted = iter(found[len(wholes) :])
    for whole, each in zip(found, parts, strict=False):
        for rows, _ in each:
            np.testing.assert_array_equal(np.asarray(whole)[rows], np.asarray(next(wanted)))


@jax.jit
def layer_and_alone(x, index, select, stacks, alone):
    """Results of a layer of stacked weights and biases, each beside those of the layer alone."""
    layers, layers_bias, experts, experts_bias = (StackMember(each, index) for each in stacks)
    layer, bias, own, own_bias = alone
    wanted = product(x, own, own_bias, select=select)
    return [
        *((linear(x, layers, layers_bias, implementation=name),
           linear(x, layer, bias, implementation=name))
          for name in ("reference", "xla", "native")),
        *((product(x, experts, each, select=select), wanted) for each in (experts_bias, own_bias)),
    ]  # fmt: skip


@pytest.mark.parametrize("format", ["float32", "bfloat16", *FORMATS])
def test_a_layer_among_stacked_layers(format):
    """Matmuls and experts read it where it lies, bit for bit; everyone else copies it."""
    x, _, _ = inputs(7, 64, 1)
    w = RNG.standard_normal((3, 5, 64, 40)).astype(np.float32)
    bias = RNG.standard_normal((3, 5, 40)).astype(np.float32)
    select = np.asarray([3, 0, 3, 4, 0, 0, 1], np.int32)
    narrow = bias[:, 0].astype(jnp.bfloat16)
    stacks = _kept(w[:, 0], format, 64, 40), narrow, _kept(w, format, 64, 40), bias
    for layer in range(3):
        own = _kept(w[layer, 0], format, 64, 40), narrow[layer]
        own += _kept(w[layer], format, 64, 40), bias[layer]
        for found, wanted in layer_and_alone(x, np.int32(layer), select, stacks, own):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("count", [0, 39, 41, 80])
def test_a_bias_that_does_not_belong_to_the_stack_is_rejected(count):
    x, _, _ = inputs(2, 8, 1)
    call = jax.jit(product)
    w, select = jnp.ones((3, 8, 40), jnp.float32), jnp.zeros(1, jnp.int32)
    if count == 0:
        assert call(x, w, jnp.zeros(0, jnp.float32), select=select).shape == (2, 40)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="bias"):
        call(x, w, jnp.zeros(count, jnp.float32), select=select).block_until_ready()


@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16", *FORMATS], every_jax=["float32"]))
def test_a_row_does_not_depend_on_the_rows_beside_it(instruction_set, dtype):
    """Bit for bit, for any number of rows, wide enough to be shared among threads."""
    x, w, bias = inputs(40, 256, 1000)
    weight = quantize(w, dtype, (256,), (1000,)) if dtype in FORMATS else jnp.asarray(w, dtype)
    same_alone(linear, (2, 3, 7, 8, 9, 12, 13, 25, 40), x, weight, bias)
    if dtype not in FORMATS:
        same_alone(unembed, (2, 5, 8, 9, 40), x, jnp.asarray(w.T, dtype))


@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16"], every_jax=["float32"]))
def test_nor_does_it_where_a_table_has_several_blocks_and_tails(instruction_set, dtype):
    x, w, _ = inputs(23, 555, 203)
    table = jnp.asarray(w.T, dtype)
    same_alone(unembed, (2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 23), x, table)


@pytest.mark.parametrize(
    "dtype", cases(["float32", "bfloat16", "w8a16", "fp8-a16", "w4a16"], every_jax=["float32"])
)
def test_nor_does_it_where_a_matrix_is_wide_and_long(instruction_set, dtype):
    """So wide that a thread takes its columns in several turns, and inputs that many rows take in
    several blocks."""
    x, w, bias = inputs(17, 1088, 2300)
    weight = quantize(w, dtype, (1088,), (2300,)) if dtype in FORMATS else jnp.asarray(w, dtype)
    same_alone(linear, (9, 16, 17), x, weight, bias)


def test_activations_of_other_types_and_zero_rows(instruction_set):
    x, w, _ = inputs(3, 64, 48)
    narrow = x.astype(jnp.bfloat16)
    found = native_call(linear)(narrow, jnp.asarray(w), None)
    assert found.dtype == jnp.bfloat16
    for format in FORMATS:
        packed = quantize(w, format, (64,), (48,))
        assert not np.asarray(native_call(linear)(jnp.zeros((2, 64)), packed, None)).any()
        tiny = jnp.full((2, 64), 1e-37)  # 127 times its inverse is infinite
        for implementation in (native_call(linear), linear):
            assert np.all(np.abs(np.asarray(implementation(tiny, packed, None))) < 1e-34)


attend = native_call(paged_attention)


def attention_case(*, head_dim=20, window=None, dtype="float32", seq=3, sinks=False, group=3):
    """Two rows of unequal length over shuffled blocks; a third row is padding. With a window scores
    are capped."""
    heads, kv_heads, block, blocks = 2 * group, 2, 4, 9
    pools = [normal(30, kv_heads, block, head_dim) for _ in range(2)]
    if dtype in ("int8", "fp8"):
        as_codes = tokens_as_int8 if dtype == "int8" else tokens_as_fp8
        pools = [QuantizedPool(*as_codes(pool)) for pool in pools]
    else:
        pools = [pool.astype(dtype) for pool in pools]
    lengths = np.array([31, 17, 0], np.int32)
    queries = np.array([seq, seq, 0], np.int32)
    start = lengths - queries
    first = np.array([0, 4 if window else 0, 0], np.int32)
    order = RNG.permutation(29)[: 2 * blocks] + 1
    tables = np.zeros((3, blocks), np.int32)
    tables[:2] = order.reshape(2, blocks)
    q = jnp.asarray(RNG.standard_normal((3, seq, heads, head_dim)), jnp.float32)
    positions = start[:, None] + np.arange(seq, dtype=np.int32)[None]
    paging = Paging(*map(jnp.asarray, (tables, first, positions, lengths)))
    logits = jnp.asarray(RNG.standard_normal(heads), jnp.float32) if sinks else None
    return q, *pools, paging, AttentionArgs(0.3, window, logits, cap=1.5 if window else None)


@pytest.mark.every_jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("window", "sinks"),
    cases([(None, False), (None, True), (5, False), (5, True)], default=[(None, False), (5, True)]),
)
@pytest.mark.parametrize("head_dim", cases([20, 64, 80], nightly=[64]))
def test_attention_over_blocks(instruction_set, dtype, window, sinks, head_dim):
    case = attention_case(head_dim=head_dim, window=window, dtype=dtype, sinks=sinks)
    found = np.asarray(attend(*case))
    wanted = np.asarray(plain(paged_attention)(*case))
    close(found[:2], wanted[:2], 2e-5)
    assert np.isfinite(found).all()


def test_every_code_of_e4m3_is_read(instruction_set):
    """With a window of one key the output is that key's value: all 254 numbers of the type."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    values = jnp.asarray(codes).view(jnp.float8_e4m3fn)
    pool = (
        jnp.zeros((2, 1, 16, 16), jnp.float8_e4m3fn)
        .at[1]
        .set(jnp.pad(values, (0, 2)).reshape(1, 16, 16))
    )
    pools = [QuantizedPool(p, jnp.ones((2, 1, 16))) for p in (pool * 0, pool)]
    for slot in range(16):
        where = ([[1]], [0], [[slot]], [16])
        paging = Paging(*(jnp.asarray(a, jnp.int32) for a in where))
        case = (jnp.zeros((1, 1, 1, 16)), *pools, paging, AttentionArgs(0.3, window=1))
        found = np.asarray(attend(*case)).ravel()
        np.testing.assert_array_equal(found, np.asarray(pool[1, 0, slot], np.float32))


@pytest.mark.every_jax
@pytest.mark.parametrize(("head_dim", "group"), [(20, 3), (64, 3), (64, 2), (20, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_attention_does_not_depend_on_batch_or_chunk(instruction_set, dtype, head_dim, group):
    q, *pools, paging, args = attention_case(seq=7, dtype=dtype, head_dim=head_dim, group=group)
    whole = np.asarray(attend(q, *pools, paging, args))
    second = jax.tree.map(lambda a: a[1:2], paging)
    alone = attend(q[1:2], *pools, second, args)
    np.testing.assert_array_equal(np.asarray(alone)[0], whole[1])
    last = replace(paging, positions=paging.positions[:, 6:])
    found = attend(q[:, 6:], *pools, last, args)
    np.testing.assert_array_equal(np.asarray(found)[:2, 0], whole[:2, 6])


@pytest.mark.parametrize(
    ("pool", "window", "head_dim"),
    cases(
        itertools.product(["float32", "bfloat16", "int8"], [None, 5], [20, 64, 96]),
        default=[
            ("float32", None, 20), ("float32", 5, 64), ("bfloat16", None, 96),
            ("bfloat16", 5, 20), ("int8", None, 64), ("int8", 5, 96),
        ],
    ),
)  # fmt: skip
def test_attention_of_bfloat16_queries(instruction_set, pool, window, head_dim):
    """The reference in float32 within bfloat16's rounding; the same bits alone as beside others."""
    q, *pools, paging, args = attention_case(
        seq=13, head_dim=head_dim, window=window, dtype=pool, sinks=True
    )
    q = q.astype(jnp.bfloat16)
    found = np.asarray(attend(q, *pools, paging, args).astype(jnp.float32))
    exact = q.astype(jnp.float32)
    wanted = np.asarray(paged_attention(exact, *pools, paging, args, implementation="reference"))
    largest = np.abs(wanted[:2]).max()
    np.testing.assert_allclose(found[:2], wanted[:2], rtol=2**-8, atol=2**-8 * largest)
    for row, begin in [(0, 12), (1, 5)]:
        of_row = jax.tree.map(lambda a, row=row: a[row : row + 1], paging)
        later = replace(of_row, positions=of_row.positions[:, begin:])
        alone = attend(q[row : row + 1, begin:], *pools, later, args).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(alone)[0], found[row, begin:])


def test_wrong_shapes_are_rejected_by_the_kernel():
    packed = quantize(np.ones((64, 20), np.float32), "w4a8", (64,), (20,))
    wrong = [
        ((jnp.ones((2, 3)), jnp.ones((5, 4)), None), {}, "inputs of w"),
        ((jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(3)), {}, "bias"),
        ((jnp.ones((2, 32)), packed, None), {}, "inputs of w"),
        ((jnp.ones((2, 64)), replace(packed, scales=packed.scales[:1]), None), {}, "scales"),
        ((jnp.ones((2, 64)), replace(packed, out_shape=(40,)), None), {}, "outputs of w"),
        ((jnp.ones((2, 3)), jnp.ones((3, 4)), None), {"prologue": Norm(jnp.ones(2))}, "norm"),
    ]
    for arrays, named, reason in wrong:
        with pytest.raises(Exception, match=f"rooflax matmul: .*{reason}"):
            jax.block_until_ready(product(*arrays, **named))


@pytest.fixture
def rejected(monkeypatch):
    """Looks at the library anew, once a test has changed what it is held to; says why it is not
    taken."""

    def reason():
        native.status.cache_clear()
        assert not native.is_ready()
        return native.status().reason

    yield reason
    monkeypatch.undo()
    native.status.cache_clear()
    assert native.is_ready()


def test_the_library_has_our_layouts_by_their_names(monkeypatch, rejected):
    assert sorted(native.layouts()) == sorted(native.LAYOUTS)
    assert len(set(native.layouts().values())) == len(native.LAYOUTS) - 1  # int8-h64 is int8
    monkeypatch.setattr(native, "LAYOUTS", (*native.LAYOUTS, "int3"))
    assert "has matrix, table, pairs" in (why := rejected()) and "int3" in why


def test_a_library_that_does_not_fit_is_not_registered(monkeypatch, rejected):
    monkeypatch.setattr(native, "_ffi_version", lambda: 0)
    assert "install rooflax again" in rejected()


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [1, 15, 16, 100, 5000])
def test_the_first_of_the_largest(instruction_set, size):
    everything = jnp.zeros(0, jnp.int32)
    call = jax.jit(lambda x: jax.ffi.ffi_call("rooflax_argmax", out)(x, everything))
    out = jax.ShapeDtypeStruct((4,), jnp.int32)
    x = RNG.integers(0, 9, (4, size)).astype(np.float32)
    x[1] = -np.inf
    x[2, size // 2] = np.nan
    np.testing.assert_array_equal(np.asarray(call(x)), np.argmax(x, axis=1))


@pytest.mark.parametrize("format", [*FORMATS, "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "rows"),
    cases(itertools.product([np.nan, np.inf], [3, 40]), default=[(np.nan, 3), (np.inf, 40)]),
)
def test_a_fault_in_the_activations_stays_visible(instruction_set, format, fault, rows):
    x, w, _ = inputs(rows, 64, 48)
    faulty = x.at[1, 5].set(fault)
    found = [native_call(linear)(faulty, _kept(w, format, 64, 48), None)]
    if format == "bfloat16":
        found.append(native_call(unembed)(faulty, _kept(w, format, 64, 48).T))
    for each in map(np.asarray, found):
        assert not np.isfinite(each[1]).any()
        assert np.isfinite(np.delete(each, 1, axis=0)).all()


def _kept(w, format, inner, outer):
    """Weights in a format, or at a float's width."""
    return quantize(w, format, (inner,), (outer,)) if format in FORMATS else jnp.asarray(w, format)
