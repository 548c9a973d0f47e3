"""`KVCache`: keys and values of past tokens, in blocks.

Layers are grouped by what they keep: everything, the last `window` tokens, or a state of fixed
size. Each layer has its own buffers, of its own heads, or reads those of a layer before it; each
group has its own pool of block numbers and each sequence one block table per group. Block 0 of a
pool stays zero: it stands where a table has no block. A block of the group with state is a row: the
state of one sequence, float32 whatever the type of K and V.

This module holds arrays and their layout. Which block belongs to whom is the block manager's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.nn.layout import STATE
from rooflax.ops.accelerator import cache_width
from rooflax.ops.cache_write import cache_write
from rooflax.ops.kv_pool import PoolLeaf as Pool
from rooflax.ops.kv_pool import QuantizedPool, zeros

States = tuple[Float[Array, "_ ..."], ...]
"""States of a layer in place of K, arrays of rows; in place of V it has nothing."""


class Heads(NamedTuple):
    """A layer's K/V heads.

    Attributes:
        num: how many.
        dim: elements of one.
        pools: 2, of keys and of values; 1 where values are the first elements of keys.
    """

    num: int
    dim: int
    pools: int = 2


CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "float8_e4m3fn": jnp.float8_e4m3fn}
"""Types of a `QuantizedPool`'s values."""


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers that share a pool of blocks.

    Attributes:
        windows: per group, how many tokens its layers see; None is all of them, STATE the group of
            layers with state.
        of_layer: per layer, its group.
        period: length of the shortest group of layers that, repeated, gives all of them.
        states: per layer, the shapes of one sequence's state; none at all if no layer has any.
        heads: per layer, those of its K and V.
        sources: per layer, the one whose K and V it attends to, in its group: itself, or one before
            it, and then it keeps none.
    """

    windows: tuple[int | None, ...]
    of_layer: tuple[int, ...]
    period: int
    states: tuple[tuple[tuple[int, ...], ...], ...] = ()
    heads: tuple[Heads, ...] = ()
    sources: tuple[int, ...] = ()

    @staticmethod
    def from_windows(
        layer_windows: tuple[int | None, ...],
        heads: Sequence[tuple[int, ...]] = (),
        *,
        period: int | None = None,
        states: tuple[tuple[tuple[int, ...], ...], ...] = (),
        sources: tuple[int, ...] = (),
    ) -> LayerGroups:
        """Groups layers of equal window; the full group, if there is one, comes first.

        Args:
            heads: per layer, fields of `Heads`; none for groups of which nothing is allocated.
            period: None is that of the windows.
            sources: per layer; none if each is its own.
        """
        windows = sorted(set(layer_windows), key=lambda w: (w is not None, w or 0))
        of_layer = tuple(windows.index(w) for w in layer_windows)
        period = period or shortest_period(layer_windows)
        sources = sources or tuple(range(len(of_layer)))
        states = states if any(states) else ()
        kept = tuple(Heads(*each) for each in heads)
        return LayerGroups(tuple(windows), of_layer, period, states, kept, sources)

    @property
    def state(self) -> int | None:
        """The group of layers with state."""
        return self.windows.index(STATE) if STATE in self.windows else None

    def attending(self, num_layers: int | None = None) -> list[int]:
        """The layers that attend to K and V, or those among the first."""
        numbered = enumerate(self.of_layer[:num_layers])
        return [layer for layer, group in numbered if group != self.state]

    def keeping(self, num_layers: int | None = None) -> list[int]:
        """The layers that keep K and V, or those among the first."""
        return [layer for layer in self.attending(num_layers) if self.sources[layer] == layer]

    def kept_heads(
        self, num_layers: int | None = None, parts: int = 1
    ) -> Iterator[tuple[int, Heads]]:
        """The layers that keep K and V, with what each has on one of `parts` tensor shards."""
        for layer in self.keeping(num_layers):
            heads = self.heads[layer]
            yield layer, heads._replace(num=heads.num // parts)

    def row_bytes(self, num_layers: int | None = None) -> int:
        """Bytes of one sequence's state in all layers, or in the first."""
        states = self.states[:num_layers]
        return 4 * sum(math.prod(shape) for shapes in states for shape in shapes)


def shortest_period(layers: tuple[Any, ...]) -> int:
    """Length of the shortest beginning that, repeated, gives all layers."""
    count = len(layers)
    for period in range(1, count + 1):
        if count % period == 0 and layers == layers[:period] * (count // period):
            return period
    return count


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Paged keys and values.

    Attributes:
        k, v: per layer one pool, [num_blocks, num_kv_heads, block_size, head_dim], on TPU with
            head_dim padded by zeros to its lanes. With `stacked`, per layer of the period one pool
            for all its repeats: repeat r's block b is block r * num_blocks + b. As int8 and fp8
            each pool is a `QuantizedPool`. Of a layer with state, k is its `States` and v empty; of
            one whose values are in its keys, v is empty; of one that reads another's, both are.
        groups: which layers share block numbers.
        block_size: tokens per block.
        stacked: whether layers are stacked for `layers="scan"`.
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]
    groups: LayerGroups = field(metadata={"static": True})
    block_size: int = field(metadata={"static": True})
    stacked: bool = field(default=False, metadata={"static": True})

    @property
    def num_repeats(self) -> int:
        """Number of layers that share one pool."""
        return len(self.groups.of_layer) // len(self.k)

    @property
    def num_bytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((self.k, self.v)))


def pool_size(pool: Any) -> int:
    """Blocks, or rows, of all layers that share a pool."""
    return jax.tree.leaves(pool)[0].shape[0]


def bytes_per_token(heads: Heads, dtype: str) -> int:
    """Bytes per token of one layer's K and V; int8 and fp8 have a float32 scale for each head."""
    width = cache_width(heads.dim)
    per_head = width + 4 if dtype in CODES else width * jnp.dtype(dtype).itemsize
    return heads.pools * heads.num * per_head


def padding_per_token(heads: Heads, dtype: str) -> int:
    """Part of `bytes_per_token` that only pads heads to `cache_width`."""
    itemsize = jnp.dtype(CODES.get(dtype, dtype)).itemsize
    return heads.pools * heads.num * (cache_width(heads.dim) - heads.dim) * itemsize


def pool_shapes(
    groups: LayerGroups,
    num_blocks: tuple[int, ...],
    block_size: int,
    *,
    stacked: bool = False,
    stages: int = 1,
) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of the pools, one entry per entry of `KVCache.k`: of K (or V), of each of the layer's
    states, or none. Each has the layers of all stages at its place."""
    num_pools = groups.period if stacked else len(groups.of_layer) // stages
    repeats = len(groups.of_layer) // num_pools

    def shapes(layer: int) -> tuple[tuple[int, ...], ...]:
        if groups.of_layer[layer] == groups.state:
            return groups.states[layer]
        heads = groups.heads[layer]
        block = (heads.num, block_size, cache_width(heads.dim))
        return (block,) if groups.sources[layer] == layer else ()

    return [
        tuple((repeats * num_blocks[groups.of_layer[layer]], *shape) for shape in shapes(layer))
        for layer in range(num_pools)
    ]


def allocate(
    groups: LayerGroups,
    num_blocks: tuple[int, ...],
    *,
    block_size: int = 16,
    dtype: str = "float32",
    stacked: bool = False,
    stages: int = 1,
    put: Callable[[np.ndarray], jax.Array] | None = None,
) -> KVCache:
    """Zeroed pools of `num_blocks[g]` blocks for each group g, block 0 included.

    Args:
        stages: of a pipeline, whose layers at one place share a pool.
        put: host arrays to the devices of a mesh; None is one device, whose memory large pools take
            as they are written where that is possible.
    """

    def made(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return zeros(shape, dtype) if put is None else put(np.zeros(shape, dtype))

    shapes = pool_shapes(groups, num_blocks, block_size, stacked=stacked, stages=stages)

    def zeros_of(shape: tuple[int, ...]) -> Any:
        if dtype in CODES:
            return QuantizedPool(made(shape, CODES[dtype]), made(shape[:3], np.float32))
        return made(shape, jnp.dtype(dtype))

    def pools_of(index: int, is_v: bool) -> Any:
        if groups.of_layer[index] == groups.state:
            return () if is_v else tuple(made(s, np.float32) for s in shapes[index])
        is_kept = shapes[index] and not (is_v and groups.heads[index].pools == 1)
        return zeros_of(*shapes[index]) if is_kept else ()

    k, v = (tuple(pools_of(i, is_v) for i in range(len(shapes))) for is_v in (False, True))
    return KVCache(k, v, groups, block_size, stacked)


def write(
    pool: Pool,
    new: Float[Array, "rows seq kv_heads own_head_dim"],
    slots: Int[Array, "rows seq"],
    *,
    implementation: str | None = None,
) -> Pool:
    """Puts new keys (or values) into their slots; in place when the pool is donated.

    A slot of NO_SLOT or more is not written, so block 0, which padded tables name, stays zero.
    """
    flat = new.reshape(-1, *new.shape[2:])
    if padding := pool.shape[3] - flat.shape[2]:
        flat = jnp.pad(flat, ((0, 0), (0, 0), (0, padding)))
    return cache_write(pool, flat, slots.reshape(-1), implementation=implementation)


def copy_blocks(
    cache: KVCache,
    sources: tuple[Int[Array, " _"], ...],
    destinations: tuple[Int[Array, " _"], ...],
) -> KVCache:
    """Gives blocks the content that others had before, one list of each per layer group.

    Block 0 as a source zeroes a block, and from 0 to 0 nothing happens.
    """

    def copied(pool: Any, index: int) -> Any:
        if not jax.tree.leaves(pool):
            return pool
        group = cache.groups.of_layer[index]
        repeats = jnp.arange(cache.num_repeats, dtype=jnp.int32)
        first = (repeats * (pool_size(pool) // cache.num_repeats))[:, None]
        source = (first + sources[group][None]).reshape(-1)
        destination = (first + destinations[group][None]).reshape(-1)
        return jax.tree.map(lambda array: array.at[destination].set(array[source]), pool)

    k = [copied(pool, index) for index, pool in enumerate(cache.k)]
    return with_pools(cache, k, [copied(pool, index) for index, pool in enumerate(cache.v)])


def with_pools(cache: KVCache, k: list[Any], v: list[Any]) -> KVCache:
    """The same cache with other arrays."""
    return replace(cache, k=tuple(k), v=tuple(v))
