"""New keys and values in their slots: the native kernel writes XLA's bits, and copies no pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.nn.batch import NO_SLOT
from rooflax.ops import native
from rooflax.ops.cache_write import CACHE_WRITE, cache_write

TOKENS, HEADS, BLOCK, HEAD_DIM, BLOCKS = 40, 3, 8, 20, 6
EDGES = (
    np.inf, -np.inf, 0.0, -0.0, 65504.0, 65519.9, 65520.0, -1e9, 6.0e-8, 2.98e-8, 2.99e-8, 6.1e-5,
    6.09e-5, 3.4e38, 1e-39, 1.00390625,
)  # fmt: skip
"""Where float16 and bfloat16 end, become subnormal, or lie half way between two numbers."""

pytestmark = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)


def new_tokens():
    rng = np.random.default_rng(0)
    shape = (TOKENS, HEADS, HEAD_DIM)
    new = rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 6, shape)
    new[5, 1, : len(EDGES)] = EDGES
    return jnp.asarray(new, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_writes_what_xla_writes(instruction_set, dtype):
    rng = np.random.default_rng(1)
    pool = jnp.asarray(rng.standard_normal((BLOCKS, HEADS, BLOCK, HEAD_DIM)), dtype)
    slots = rng.permutation(BLOCKS * BLOCK + 9)[:TOKENS]
    slots = jnp.asarray(np.where(slots < BLOCKS * BLOCK, slots, NO_SLOT), jnp.int32)
    assert np.sum(np.asarray(slots) == NO_SLOT) > 2
    wanted = np.asarray(cache_write(pool, new_tokens(), slots, implementation="xla"))
    found = np.asarray(cache_write(pool, new_tokens(), slots, implementation="native"))
    assert found.dtype == wanted.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_pool_is_copied(dtype):
    """Not even inside a loop, as XLA's own scatter copies and widens one of bfloat16."""

    def steps(pool, new, slots):
        def one(index, pool):
            return cache_write(pool, new, slots + index, implementation="native")

        return jax.lax.fori_loop(0, 3, one, pool)

    pool = jnp.zeros((500, HEADS, BLOCK, HEAD_DIM), dtype)
    arguments = (pool, new_tokens(), jnp.arange(TOKENS, dtype=jnp.int32))
    memory = jax.jit(steps, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pool.nbytes / 4


def test_a_pool_that_is_needed_later_stays_as_it_is():
    pool = jnp.zeros((BLOCKS, HEADS, BLOCK, HEAD_DIM))
    slots = jnp.arange(TOKENS, dtype=jnp.int32)

    def both(pool, new):
        return pool, cache_write(pool, new, slots, implementation="native")

    before, after = jax.jit(both)(pool, new_tokens())
    assert not np.asarray(before).any() and np.asarray(after).any()
    assert not np.asarray(pool).any()


def test_shapes_that_do_not_fit_are_rejected():
    pool, slots = jnp.zeros((BLOCKS, HEADS + 1, BLOCK, HEAD_DIM)), jnp.zeros(TOKENS, jnp.int32)
    with pytest.raises(Exception, match="cache write: shapes"):
        jax.block_until_ready(CACHE_WRITE("native", pool, new_tokens(), slots))
