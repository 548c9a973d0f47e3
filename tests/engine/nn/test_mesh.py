"""The helpers of tensor parallelism: the identity on one device, the same result on two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rooflax.errors import RequestError
from rooflax.nn import mesh as lib
from rooflax.nn.shards import Shards, check_split


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("tensor",))


def on_two(mesh, function, in_specs, out_specs):
    mapped = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )
    places = [NamedSharding(mesh, spec) for spec in in_specs]
    return lambda *arrays: mapped(*jax.device_put(arrays, tuple(places)))


def test_without_a_mesh_the_helpers_are_the_identity():
    x = jnp.arange(6.0).reshape(2, 3)
    assert lib.shards_of(None) is None
    assert lib.all_reduce(x, None) is x
    assert lib.on_one_shard(x, None) is x and lib.on_one_shard(None, None) is None
    assert lib.gather_vocab(x, 2, None).tolist() == [[0, 1], [3, 4]]
    assert lib.embed(x, jnp.asarray([[1, 0]]), None).tolist() == [[[3, 4, 5], [0, 1, 2]]]


def test_embedding_split_over_the_vocabulary(mesh):
    table = np.random.RandomState(0).standard_normal((10, 3)).astype(np.float32)
    tokens = np.array([[0, 9, 4, 5]], np.int32)
    shards = lib.shards_of(mesh)
    embed = on_two(mesh, lambda t, i: lib.embed(t, i, shards), (P("tensor"), P()), P())
    np.testing.assert_array_equal(embed(table, tokens), table[tokens])


def test_logits_of_a_padded_vocabulary_are_gathered_and_cut(mesh):
    logits = np.random.RandomState(0).standard_normal((3, 10)).astype(np.float32)
    shards = lib.shards_of(mesh)
    gather = on_two(mesh, lambda x: lib.gather_vocab(x, 9, shards), (P(None, "tensor"),), P())
    np.testing.assert_array_equal(gather(logits), logits[:, :9])


def test_a_bias_counts_once_in_a_sum_over_parts(mesh):
    x, bias = np.ones((3, 4), np.float32), np.arange(5, dtype=np.float32)
    w = np.random.RandomState(0).standard_normal((4, 5)).astype(np.float32)
    shards = lib.shards_of(mesh)

    def part(x, w, bias):
        return lib.all_reduce(x @ w + lib.on_one_shard(bias, shards)[None], shards)

    run = on_two(mesh, part, (P(None, "tensor"), P("tensor"), P()), P())
    np.testing.assert_allclose(run(x, w, bias), x @ w + bias, rtol=1e-5, atol=1e-5)


def test_a_remainder_is_rejected_with_the_arithmetic():
    check_split({"kv_heads": 4, "mlp": 12}, Shards(tensor=2))
    check_split({"heads": 3, "vocab": 7}, Shards(tensor=2))
    with pytest.raises(RequestError, match=r"5 kv_heads.*5 = 2 x 2 \+ 1"):
        check_split({"kv_heads": 5, "mlp": 12}, Shards(tensor=2))
