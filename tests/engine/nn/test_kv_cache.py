"""The paged cache: what is written is read, where it was meant to be; block arithmetic."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.nn.batch import NO_SLOT, Batch
from rooflax.nn.host_memory import anonymous_bytes
from rooflax.nn.kv_cache import (
    Heads,
    LayerGroups,
    allocate,
    bytes_per_token,
    copy_blocks,
    pool_shapes,
    pool_size,
    with_pools,
    write,
)
from rooflax.nn.layout import blocks_needed, ceil_div
from rooflax.ops import native
from rooflax.ops.attention.paging import gather

gathered, written, copied = jax.jit(gather), jax.jit(write), jax.jit(copy_blocks)
ragged = jax.jit(Batch.ragged, static_argnames="longest")
slots_of = jax.jit(Batch.slot_mapping, static_argnums=(1, 2))


def read(cache, layer, block_table, length, first_position=0):
    """A sequence's visible K and V of one layer, contiguous.

    Returns:
        k, v: [length - first_position, num_kv_heads, head_dim]; the same where values are in keys.
    """
    repeat, index = divmod(cache.groups.sources[layer], len(cache.k))

    def contiguous(pool):
        offset = repeat * (pool_size(pool) // cache.num_repeats)
        heads = np.asarray(gathered(pool, np.array([block_table], np.int32) + np.int32(offset)))
        return heads[0].swapaxes(0, 1)[: length - first_position]

    v = cache.v[index] if cache.groups.heads[layer].pools == 2 else cache.k[index]
    return contiguous(cache.k[index]), contiguous(v)


@pytest.mark.parametrize(
    ("windows", "groups", "of_layer", "period"),
    [
        ((None,) * 3, (None,), (0, 0, 0), 1),
        ((7, None, 7, None), (None, 7), (1, 0, 1, 0), 2),
        ((None, 7, 7, 7), (None, 7), (0, 1, 1, 1), 4),
        ((5, 9, 5, 9, 5, 9), (5, 9), (0, 1, 0, 1, 0, 1), 2),
        ((5, 5, 5), (5,), (0, 0, 0), 1),
        ((None, None, 3, None, None, 3), (None, 3), (0, 0, 1, 0, 0, 1), 3),
        ((None,), (None,), (0,), 1),
        ((4, None, 4), (None, 4), (1, 0, 1), 3),
    ],
)
def test_layers_of_equal_window_share_a_pool(windows, groups, of_layer, period):
    found = LayerGroups.from_windows(windows)
    assert (found.windows, found.of_layer, found.period) == (groups, of_layer, period)


def most_blocks(window, max_tokens, new_tokens, block_size):
    """Brute force: every way of writing chunks, each after letting go of what is out of sight."""
    worst = 0
    for chunk in range(1, new_tokens + 1):
        for first_chunk in range(1, chunk + 1):
            computed, size = 0, first_chunk
            while computed < max_tokens:
                end = min(computed + size, max_tokens)
                first = max(computed - window + 1, 0) // block_size if window else 0
                worst = max(worst, ceil_div(end, block_size) - first)
                computed, size = end, chunk
    return worst


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8])
def test_blocks_needed_is_never_less_than_what_is_held_and_hardly_more(window, block_size):
    for max_tokens in (1, 2, 7, 16, 23):
        for new_tokens in (1, 3, 6):
            held = most_blocks(window, max_tokens, new_tokens, block_size)
            needed = blocks_needed(window, max_tokens, new_tokens, block_size)
            assert held <= needed <= held + 1


def test_num_bytes_is_that_of_the_arrays():
    groups = LayerGroups.from_windows((7, None, 7, None), ((2, 6),) * 4)
    for stacked in (False, True):
        cache = allocate(groups, (5, 3), block_size=4, dtype="bfloat16", stacked=stacked)
        # Two layers of each group, K and V, two bytes each.
        assert cache.num_bytes == 2 * 2 * 2 * (5 + 3) * 2 * 4 * 6
        assert len(cache.k) == (2 if stacked else 4)
        assert cache.num_repeats == (2 if stacked else 1)
        shapes = pool_shapes(groups, (5, 3), 4, stacked=stacked)
        assert [(a.shape,) for a in cache.k] == shapes == [(a.shape,) for a in cache.v]
        assert not any(np.asarray(a).any() for a in cache.k)


def test_pools_have_each_layers_heads_and_layers_that_read_others_have_none():
    heads = ((2, 6), (1, 10), (2, 6), (1, 10))
    groups = LayerGroups.from_windows((7, None) * 2, heads, sources=(0, 1, 0, 1))
    cache = allocate(groups, (5, 3), block_size=4, stacked=False)
    assert [pool.shape if isinstance(pool, jax.Array) else pool for pool in cache.k] == [
        (3, 2, 4, 6), (5, 1, 4, 10), (), (),
    ]  # fmt: skip
    assert cache.num_bytes == 2 * 4 * 4 * (3 * 2 * 6 + 5 * 1 * 10)
    assert (groups.attending(), groups.keeping()) == ([0, 1, 2, 3], [0, 1])
    assert next(iter(groups.kept_heads(parts=2))) == (0, (1, 6, 2))
    k = written(cache.k[1], jnp.ones((1, 1, 1, 10)), jnp.asarray([[8]], jnp.int32))
    cache = with_pools(cache, [cache.k[0], k, (), ()], list(cache.v))
    assert read(cache, 3, [2], 1)[0].tolist() == [[[1.0] * 10]]


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 40), ("int8", 14)])
def test_values_in_keys_have_no_pool(dtype, bytes_each):
    groups = LayerGroups.from_windows((None,) * 3, ((1, 10, 1),) * 3)
    for stacked, layers in ((False, 3), (True, 1)):
        cache = allocate(groups, (5,), block_size=4, dtype=dtype, stacked=stacked)
        assert cache.v == ((),) * layers
        assert cache.num_bytes == 3 * 5 * 4 * bytes_per_token(Heads(1, 10, 1), dtype)
        assert bytes_per_token(Heads(1, 10, 1), dtype) == bytes_each
    cache = with_pools(
        cache, [written(cache.k[0], jnp.ones((1, 1, 1, 10)), jnp.asarray([[8]]))], [()]
    )
    k, v = read(cache, 0, [2], 1)
    np.testing.assert_allclose(k, np.ones((1, 1, 10)), rtol=1e-6)
    np.testing.assert_array_equal(k, v)
    moved = copied(cache, (jnp.asarray([2]),), (jnp.asarray([3]),))
    np.testing.assert_array_equal(read(moved, 0, [3], 1)[0], k)


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_written_through_slots_is_read_back(stacked):
    """Two rows of unequal length in shuffled blocks; a padded token lands in scratch."""
    groups, block_size, repeats = LayerGroups.from_windows((None,) * 3, ((2, 6),) * 3), 4, 3
    num_blocks = 8
    cache = allocate(groups, (num_blocks,), block_size=block_size, stacked=stacked)
    new = np.random.RandomState(0).standard_normal((2, 7, 2, 6)).astype(np.float32)
    tables = np.array([[5, 2], [7, 3]], np.int32)
    lens = np.array([7, 5], np.int32)
    batch = ragged(
        jnp.zeros(14, jnp.int32),
        jnp.asarray([0, 7]),
        jnp.asarray(lens),
        jnp.zeros(2, jnp.int32),
        (jnp.asarray(tables),),
        (jnp.zeros(2, jnp.int32),),
        longest=7,
    )
    slots = np.asarray(slots_of(batch, 0, block_size)).reshape(2, 7)
    assert (slots[1, 5:] == NO_SLOT).all()
    k, v = list(cache.k), list(cache.v)
    for layer in range(3):
        pool, first = (0, layer * num_blocks) if stacked else (layer, 0)
        shifted = slots + first * block_size
        k[pool] = written(k[pool], new + np.float32(layer), shifted)
        v[pool] = written(v[pool], -new - np.float32(layer), shifted)
    cache = with_pools(cache, k, v)
    assert cache.num_repeats == (repeats if stacked else 1)
    for layer in range(3):
        for row in range(2):
            got_k, got_v = read(cache, layer, tables[row].tolist(), int(lens[row]))
            np.testing.assert_array_equal(got_k, new[row, : lens[row]] + layer)
            np.testing.assert_array_equal(got_v, -new[row, : lens[row]] - layer)
    untouched = [b for b in range(num_blocks) if b not in tables]
    assert not np.asarray(cache.k[0])[untouched].any()


def test_slots_of_a_window_that_has_let_go_of_blocks():
    batch = ragged(
        jnp.zeros(3, jnp.int32),
        jnp.asarray([0]),
        jnp.asarray([3]),
        jnp.asarray([9]),
        (jnp.asarray([[6, 2]]),),
        (jnp.asarray([4]),),
        longest=3,
    )
    # Position 9 is the sixth token from position 4 on: block 2, offset 1.
    assert slots_of(batch, 0, 4).tolist() == [[9, 10, 11]]
    batch = Batch(**{**vars(batch), "first_positions": (jnp.asarray([8]),)})
    assert slots_of(batch, 0, 4).tolist() == [[25, 26, 27]]


def test_a_list_of_tokens_says_whose_each_is_and_where():
    """Three sequences, the second without tokens, and a gap before the third."""
    batch = ragged(
        jnp.zeros(8, jnp.int32),
        jnp.asarray([0, 2, 4]),
        jnp.asarray([2, 0, 3]),
        jnp.asarray([5, 77, 0]),
        (jnp.asarray([[1, 2], [3, 4], [5, 6]]),),
        (jnp.zeros(3, jnp.int32),),
        longest=3,
    )
    assert batch.valid[0].tolist() == [True, True, False, False, True, True, True, False]
    assert np.asarray(batch.positions[0])[np.asarray(batch.valid[0])].tolist() == [5, 6, 0, 1, 2]
    assert int(batch.num_tokens) == 7
    slots = slots_of(batch, 0, 4)[0].tolist()
    assert slots == [9, 10, NO_SLOT, NO_SLOT, 20, 21, 22, NO_SLOT]


def test_write_is_in_place_when_the_pool_is_donated():
    pool = jnp.zeros((4, 2, 3, 5))
    new, slots = jnp.ones((1, 1, 2, 5)), jnp.asarray([[4]])
    compiled = jax.jit(write, donate_argnums=0).lower(pool, new, slots).compile()
    assert "input_output_alias" in compiled.as_text()


def test_valid_marks_the_real_tokens():
    batch = Batch.dense(jnp.zeros((3, 4), jnp.int32), lengths=jnp.asarray([4, 0, 2]))
    assert batch.valid.astype(jnp.int32).sum(1).tolist() == [4, 0, 2]
    assert batch.positions[1].tolist() == [0, 1, 2, 3]


def test_int8_pools_have_the_same_verbs():
    """What is written comes back within half a step of its head's largest element."""
    groups = LayerGroups.from_windows((None, None), ((3, 8),) * 2)
    cache = allocate(groups, (5,), block_size=4, dtype="int8")
    assert cache.num_bytes == 5 * 4 * 2 * bytes_per_token(Heads(3, 8), "int8")
    new = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 3, 8)), jnp.float32)
    slots = jnp.asarray([[8, 9, 10, 11, 16, 17]], jnp.int32)
    cache = replace(cache, k=(written(cache.k[0], new, slots), cache.k[1]))
    k, v = read(cache, 0, [2, 4], 6)
    step = np.abs(np.asarray(new[0])).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.asarray(k) - np.asarray(new[0])) <= step * 0.5001).all()
    assert not np.asarray(v).any()
    zero, two = (jnp.asarray([block], jnp.int32) for block in (0, 2))
    cleared = copied(cache, (zero,), (two,))
    assert not np.asarray(read(cleared, 0, [2, 4], 6)[0])[:4].any()


def test_fp8_pools_have_the_same_verbs():
    """What is written comes back within a sixteenth of itself; zeros stay zeros."""
    groups = LayerGroups.from_windows((None,), ((3, 8),))
    for name in ("fp8", "float8_e4m3fn"):
        cache = allocate(groups, (5,), block_size=4, dtype=name)
        assert cache.k[0].values.dtype == jnp.float8_e4m3fn
        assert cache.num_bytes == 5 * 4 * bytes_per_token(Heads(3, 8), name)
    scale = 10.0 ** np.arange(-9, 9, 3)[:, None, None]  # of tokens: far beyond e4m3's own range
    new = np.random.default_rng(0).standard_normal((6, 3, 8)) * scale
    new[3, 1] = 0
    slots = jnp.asarray([[8, 9, 10, 11, 16, 17]], jnp.int32)
    k = written(cache.k[0], jnp.asarray(new[None], jnp.float32), slots)
    found = np.asarray(read(replace(cache, k=(k,)), 0, [2, 4], 6)[0])
    smallest = np.abs(new).max(-1, keepdims=True) * 2.0**-15
    assert (np.abs(found - new) <= np.maximum(np.abs(new), smallest) / 16 * 1.0001).all()
    largest = np.abs(new) == np.abs(new).max(-1, keepdims=True)
    np.testing.assert_allclose(found[largest], new[largest], rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8"])
def test_copied_blocks_take_what_was_there_before(dtype, stacked):
    """Two groups; in one of them a source is another copy's destination."""
    groups = LayerGroups.from_windows((None, 4, None, 4), ((3, 8), (2, 6)) * 2)
    num_blocks = (5, 4)
    cache = allocate(groups, num_blocks, block_size=4, dtype=dtype, stacked=stacked)
    state = np.random.RandomState(0)

    def filled(pool):
        return jnp.asarray(state.randint(1, 99, pool.shape).astype(pool.dtype))

    cache = with_pools(cache, *jax.tree.map(filled, (list(cache.k), list(cache.v))))
    sources = (jnp.asarray([1, 2, 0], jnp.int32), jnp.asarray([3, 0, 0], jnp.int32))
    destinations = (jnp.asarray([2, 4, 0], jnp.int32), jnp.asarray([1, 0, 0], jnp.int32))
    moved = copied(cache, sources, destinations)
    from_ = {0: [0, 1, 1, 3, 2], 1: [0, 3, 2, 3]}
    for index, group in enumerate(groups.of_layer[: len(cache.k)]):
        repeats = np.arange(cache.num_repeats)[:, None] * num_blocks[group]
        order = (repeats + np.array(from_[group])[None]).reshape(-1)
        for name in ("k", "v"):
            before, after = getattr(cache, name)[index], getattr(moved, name)[index]
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                np.testing.assert_array_equal(np.asarray(new), np.asarray(old)[order])


@pytest.mark.skipif(not (native.is_ready() and sys.platform == "linux"), reason="no native zeros")
def test_pools_take_memory_as_they_are_written():
    groups = LayerGroups.from_windows((None,), (Heads(2, 64),))

    def grown(before=0):
        return anonymous_bytes() - before

    def made():
        return allocate(groups, (1 << 13,)).k[0]  # 64 MiB, as V

    ones = jax.block_until_ready(jnp.ones(1 << 24))
    del ones  # whose memory may come back
    before = grown()
    pool = jax.block_until_ready(made())
    assert grown(before) < 8 << 20 and pool.nbytes == 64 << 20
    new = jnp.ones((1, 40, 2, 64))
    slots = (jnp.arange(40, dtype=jnp.int32) + (1 << 16))[None]
    pool = jax.block_until_ready(jax.jit(write, donate_argnums=0)(pool, new, slots))
    assert grown(before) < 16 << 20
    assert int((pool != 0).sum()) == 40 * 2 * 64
