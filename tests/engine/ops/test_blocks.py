"""GGUF's block types as weights: their numbers are gguf-py's, and kernels compute with them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from rooflax.ops import accelerator, native
from rooflax.ops.linear import cpu, linear, unembed
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import CODES, StackMember, class_of, pack, pack_blocks, packed_bytes
from rooflax.ops.weights.blocks import Block, Supers
from tests.gguf_cases import HALVES, random_blocks
from tests.marks import cases
from tests.support.ops.calls import calls_of, dot, same_alone

pytestmark = pytest.mark.oldest_jax

CLASSES = {kind: cls for cls in CODES.values() if issubclass(cls, Block) for kind in cls.blocks}
EARLIER = {"Q8_0": "w8a8-g32", "Q4_0": "w4a8", "MXFP4": "mxfp4-a16"}
"""Types whose formats are not theirs alone."""
EXTREME = np.array([0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1.5], np.float16)
"""Zero, the smallest denormals, the smallest normal number, the largest ones, and any."""
ROWS = (1, 3, 8, 9, 12, 16, 33, 40)
OUTER = 53

every_kind = pytest.mark.parametrize(
    "kind", cases(CLASSES, every_jax=["Q4_1", "Q5_0", "Q4_K", "Q6_K", "IQ4_XS"])
)
needs_kernels = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)


def test_every_type_is_tried():
    assert set(CLASSES) == set(HALVES)


def wanted_numbers(kind, blocks):
    """[..., values] as gguf-py has them."""
    return quants.dequantize(blocks.reshape(*blocks.shape[:-2], -1), GGMLQuantizationType[kind])


def drawn(kind, inner, *stack, outer=OUTER, halves=None, seed=0):
    """Codes [*stack, out, in], scales [*stack, out, groups] and numbers [*stack, out, in]."""
    count = int(np.prod(stack, initial=1)) * outer
    blocks = random_blocks(kind, count, inner, halves, seed)
    codes, scales = CLASSES[kind].from_blocks(kind, blocks)
    lead = (*stack, outer)
    return (
        codes.reshape(*lead, -1)[..., :inner],
        scales.reshape(*lead, -1)[..., : inner // 32],
        wanted_numbers(kind, blocks).reshape(*lead, -1)[..., :inner],
    )


def packed(kind, codes, scales, *, rounds=True):
    """The weight in the format of a type, or with activations kept."""
    name = CLASSES[kind].blocks[kind]
    w = pack(name, codes, scales, codes.shape[-1:], codes.shape[-2:-1])
    return w if rounds else replace(w, format=f"{name}-a16")


numbers = jax.jit(lambda w: w.numbers())
taken = jax.jit(lambda w, ids: w.take(ids))


@every_kind
@pytest.mark.parametrize(
    ("inner", "halves"),
    cases(
        [(64, None), (128, None), (192, EXTREME), (256, EXTREME), (512, None)],
        nightly=[(128, None), (256, EXTREME)],
    ),
)
def test_numbers_are_those_of_gguf_py(kind, inner, halves):
    """Also of parts of a block: fewer groups share a scale then."""
    codes, scales, wanted = drawn(kind, inner, halves=halves)
    groups = codes.reshape(OUTER, -1, 32)
    found = CLASSES[kind].scaled(groups, scales).reshape(wanted.shape)
    np.testing.assert_array_equal(found, wanted)
    assert CLASSES[kind].are_finite(scales).all()
    w = packed(kind, codes, scales)
    assert w.shape == (inner, OUTER) and w.fits(inner)
    np.testing.assert_array_equal(numbers(w).T, wanted)
    ids = np.array([0, OUTER - 1, 16, 5, 5, OUTER])  # the last one takes its nearest row
    rows = np.asarray(taken(w, jnp.asarray(ids)))
    np.testing.assert_array_equal(rows, wanted[np.minimum(ids, OUTER - 1)])


@every_kind
@pytest.mark.parametrize("inner", cases([64, 256, 768], nightly=[256]))
def test_packing_has_an_inverse(kind, inner):
    """Of one weight, and of a stack of experts."""
    cls = CLASSES[kind]
    for stack in ((), (3,)):
        codes, scales, wanted = drawn(kind, inner, *stack)
        w = packed(kind, codes, scales)
        like = cls.like(inner, OUTER, stack)
        assert [(a.shape, a.dtype) for a in like] == [(a.shape, a.dtype) for a in w.arrays]
        assert w.stack == stack and w.shape == (*stack, inner, OUTER)
        for found, given in zip(w.unpacked(), (codes, scales), strict=True):
            assert found.dtype == given.dtype
            np.testing.assert_array_equal(found, given)
        if stack:
            np.testing.assert_array_equal(numbers(w).swapaxes(-1, -2), wanted)
            np.testing.assert_array_equal(numbers(w.member(1)).T, wanted[1])
    lines = cls.pack_codes(np.pad(codes[0], ((0, -OUTER % 16), (0, 0))))
    assert lines.dtype == np.uint8 and lines.size * 8 == (OUTER + -OUTER % 16) * inner * cls.bits


@needs_kernels
@pytest.mark.parametrize("kind", [*CLASSES, "Q8_0", "Q4_0", "MXFP4"])
def test_the_library_packs_what_numpy_does(kind):
    """Any bytes, of one weight and of a stack; what only fills a panel has scales of zero."""
    cls = CLASSES.get(kind) or class_of(EARLIER[kind])
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for stack, outer in (((), OUTER), ((2,), 20)):
        lead, count = (*stack, outer), int(np.prod(stack, initial=1)) * outer
        rng = np.random.default_rng(outer)
        blocks = rng.integers(0, 256, (count, 512 // values, nbytes)).astype(np.uint8)
        codes, scales = cls.from_blocks(kind, blocks)
        shapes = (cls.blocks[kind], (512,), (outer,))
        wanted = pack(shapes[0], codes.reshape(*lead, 512), scales.reshape(*lead, -1), *shapes[1:])
        rows = np.arange(count, dtype=np.uint64) * np.uint64(blocks.strides[0])
        rows = (rows + np.uint64(blocks.ctypes.data)).reshape(lead)
        found = pack_blocks(shapes[0], kind, rows, *shapes[1:])
        assert found is not None
        for one, other in zip(found.unpacked(), wanted.unpacked(), strict=True):
            assert one.tobytes() == other.tobytes()
        assert np.asarray(found.scales).tobytes() == np.asarray(wanted.scales).tobytes()


@pytest.mark.parametrize("kind", [k for k, cls in CLASSES.items() if issubclass(cls, Supers)])
def test_groups_of_one_block_have_one_float16(kind):
    """Whatever else is said of them is an error, and no wrong number."""
    codes, scales, _ = drawn(kind, 256)
    with pytest.raises(ValueError, match="other scales"):
        packed(kind, codes, scales + np.arange(8, dtype=np.uint64))
    assert not CLASSES[kind].fits(96)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_blocks_stay_in_panels_where_others_are_matrices(monkeypatch, kind):
    """On TPU, where a folder that was written on a CPU opens."""
    monkeypatch.setattr(accelerator, "platform", lambda: "tpu")
    codes, scales, wanted = drawn(kind, 256)
    w = packed(kind, codes, scales)
    assert w.packing == "panels" and w.nbytes == packed_bytes(w.format, 256, OUTER)
    np.testing.assert_array_equal(numbers(w).T, wanted)


def broken(kind, number):
    """A drawn weight with one float16 of row 5, block 1 that is `number`; which groups have it."""
    blocks = random_blocks(kind, OUTER, 512)
    begin = HALVES[kind][-1]
    blocks[5, 1, begin : begin + 2] = np.array([number], "<f2").view(np.uint8)
    codes, scales = CLASSES[kind].from_blocks(kind, blocks)
    bad = np.zeros(scales.shape, bool)
    bad.reshape(OUTER, blocks.shape[1], -1)[5, 1] = True
    return codes.reshape(OUTER, -1), scales, bad


@every_kind
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_broken_scales_are_found(kind, number):
    """Those that the numbers of a group show: infinity times zero is NaN."""
    _, scales, bad = broken(kind, number)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(CLASSES[kind].are_finite(scales), ~bad)


@needs_kernels
@every_kind
def test_kernels_with_broken_scales(instruction_set, kind):
    """Their output is no number, and every other output is what it was."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((40, 512)), jnp.float32)
    for number in (np.nan, np.inf):
        codes, scales, bad = broken(kind, number)
        whole = np.where(bad, 0, scales).astype(scales.dtype)
        for rounds in (True, False):
            found = product(x, packed(kind, codes, scales, rounds=rounds))
            wanted = np.asarray(product(x, packed(kind, codes, whole, rounds=rounds)))
            assert not np.isfinite(found[:, 5]).any() and np.isfinite(wanted).all()
            keep = np.arange(OUTER) != 5
            np.testing.assert_array_equal(np.asarray(found)[:, keep], wanted[:, keep])


product = jax.jit(partial(linear, bias=None, implementation="native"))
"""Compiled once for all instruction sets, which the library chooses among when it runs."""
selected = jax.jit(lambda x, w, select: cpu.selected_matmul(LinearArgs(x, w, None), select))


def on_the_grid(rows, inner):
    """Rows that rounding to int8 leaves as they are: whole numbers, 127 among each group's."""
    rng = np.random.default_rng((rows, inner))
    x = rng.integers(-127, 128, (rows, inner // 32, 32))
    x[..., 7] = 127
    scales = 2.0 ** rng.integers(-3, 4, (rows, inner // 32, 1)) / 64
    return jnp.asarray((x * scales).reshape(rows, inner), jnp.float32)


@needs_kernels
@every_kind
@pytest.mark.parametrize("rounds", [True, False])
def test_kernels_multiply_the_numbers(instruction_set, kind, rounds):
    for inner, several in ((64, (1, 33)), (512, ROWS)):
        codes, scales, _ = drawn(kind, inner)
        w = packed(kind, codes, scales, rounds=rounds)
        x = on_the_grid(several[-1], inner)
        np.testing.assert_array_equal(w.activations(x), x)
        wanted = np.asarray(dot(w, x))
        found = calls_of(linear, several)(x, w, None) + calls_of(unembed, (1, 33))(x, w)
        for rows in map(np.asarray, found):
            near = wanted[: len(rows)]
            np.testing.assert_allclose(rows, near, rtol=0, atol=4e-6 * np.abs(near).max())


@needs_kernels
@every_kind
@pytest.mark.parametrize("rounds", [True, False])
def test_a_row_does_not_depend_on_the_rows_beside_it(instruction_set, kind, rounds):
    """Bit for bit, wide enough to be shared among threads."""
    codes, scales, _ = drawn(kind, 256, outer=1000)
    w = packed(kind, codes, scales, rounds=rounds)
    x = jnp.asarray(np.random.default_rng(7).standard_normal((40, 256)), jnp.float32)
    same_alone(linear, ROWS, x, w, None)


@needs_kernels
@every_kind
def test_experts_and_layers_are_read_where_they_lie(instruction_set, kind):
    """One of a stack, and rows with experts of their own, have the bits of each weight alone."""
    codes, scales, _ = drawn(kind, 64, 3, outer=64)
    stack = packed(kind, codes, scales)
    alone = [packed(kind, codes[i], scales[i]) for i in range(3)]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((11, 64)), jnp.float32)
    for i in range(3):
        found = product(x, StackMember(stack, jnp.int32(i)))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(product(x, alone[i])))
    select = jnp.asarray([0, 2, 1, 1, 0, 2, 2, 2, 1, 0, 2], jnp.int32)
    found = selected(x, stack, select)
    for row, member in enumerate(np.asarray(select)):
        wanted = product(x[row : row + 1], alone[member])
        np.testing.assert_array_equal(np.asarray(found)[row], np.asarray(wanted)[0])
