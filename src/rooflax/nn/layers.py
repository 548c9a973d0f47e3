"""Running a model's layers: unrolled in the program, or scanned over stacked weights.

A layer is a function; this module repeats it and threads the KV cache through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import KVCache, LayerGroups, States, pool_size, with_pools, write
from rooflax.nn.layout import STATE
from rooflax.ops.accelerator import block_size, cache_width
from rooflax.ops.attention import (
    AttentionArgs,
    Dense,
    Projected,
    attention,
    attention_step,
    ragged_attention,
)
from rooflax.ops.control import is_traced, scan
from rooflax.ops.linear.api import LINEAR
from rooflax.ops.weights import Composite, MixedStack, StackMember, at, stack_leaves, taken

LayerWeights = dict[str, Any]
Attend = Callable[..., Float[Array, "B T N H"]]
Recall = Callable[..., Float[Array, "T ..."]]
Slots = tuple[jax.Array | None, ...]
Layer = Callable[..., Float[Array, "B T D"]]

REMAT_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
"""What the backward pass keeps of a layer's forward pass; the rest is computed again."""


def run_layers(
    functions: Sequence[Layer],
    weights: dict[str, Any],
    x: Float[Array, "B T D"],
    batch: Batch,
    cache: KVCache | None,
    *,
    groups: LayerGroups,
    options: ExecutionOptions,
    shards: mesh.Shards | None = None,
    remat: str | None = None,
    given: Float[Array, "layers B T W"] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """x through all layers; with stages through each one's own, one stage after the other.

    Args:
        functions: per layer (its weights, x, attend=) -> x, one object for all layers of a kind.
            attend(q, k, v, scale=, sinks=, new=) sees to cache, masks and windows: q is [B, T, N,
            H], k and v [B, T, K, H] of the new tokens, or None where the layer attends to
            another's; v alone is None where values are the keys. A layer with state gets
            recall(run, shapes) there.
        weights: with "layers" (a tuple, one dict per layer) or "stacked_layers" (one dict per
            layer of the repeating group, each array with a leading axis of repeats).
        x: the embedding; `batch.hidden` takes its place.
        cache: paged cache, stacked exactly when the weights are; None runs whole sequences.
        remat: name in REMAT_POLICIES; None keeps every intermediate for the backward pass.
        given: what each layer gets as `given`; None is nothing.
    """
    run = _scan if "stacked_layers" in weights else _unrolled
    layers = weights.get("stacked_layers") or weights["layers"]
    shared = _Pass(batch, _slots(batch, cache, groups), groups, options)
    x = x if batch.hidden is None else batch.hidden

    def own(x: jax.Array, cache: KVCache | None) -> tuple[jax.Array, KVCache | None]:
        part = mesh.local_layers(given, shards)
        return run(functions, layers, x, part, cache, shared, remat)

    if shards is None or shards.stage == 1:
        return own(x, cache)
    return mesh.in_stages(own, x, cache, shards)


def _unrolled(
    functions: Sequence[Layer],
    layers: Sequence,
    x: jax.Array,
    given: jax.Array | None,
    cache: KVCache | None,
    shared: _Pass,
    remat: str | None,
) -> tuple[jax.Array, KVCache | None]:
    held, of_layer = _Held(cache, shared.groups, len(layers)), shared.groups.of_layer

    def run(
        layer: Layer, group: int, lent: bool, w: LayerWeights, x: jax.Array, own: Any, pools: Any
    ) -> Any:
        attend = shared.memory(pools, group, lent)
        return layer(w, x, attend=attend, **_given(own)), attend.pools

    kinds = [(f, of_layer[i], held.is_lent(i)) for i, f in enumerate(functions)]
    runs = {kind: _once(partial(run, *kind), x, shared, remat) for kind in kinds}
    for index, layer_weights in enumerate(layers):
        own = None if given is None else given[index]
        x, pools = runs[kinds[index]](layer_weights, x, own, held.pools(index, 0))
        held.keep(index, pools)
    return x, held.cache()


def _scan(
    functions: Sequence[Layer],
    stacked: tuple[LayerWeights, ...],
    x: jax.Array,
    given: jax.Array | None,
    cache: KVCache | None,
    shared: _Pass,
    remat: str | None,
) -> tuple[jax.Array, KVCache | None]:
    """One turn of the scan runs the repeating group once; the pools are carried in place.

    Weights stay in their stacks where a kernel reads them there; the rest is small.
    """
    repeats = _num_repeats(stacked)
    stays = LINEAR.preferred(shared.options.kernels).reads_stacks
    whole = MixedStack | Composite
    kept = [
        {k: w for k, w in layer.items() if isinstance(w, whole) or stays(w)} for layer in stacked
    ]
    moved = [{k: w for k, w in stacked[i].items() if k not in kept[i]} for i in range(len(kept))]

    def body(carry: Any, xs: Any) -> tuple[Any, None]:
        x, carried = carry
        repeat, slices, own = xs
        held = _Held(carried, shared.groups, len(slices))
        for index, layer_weights in enumerate(slices):
            layer_weights |= {key: at(w, repeat) for key, w in kept[index].items()}
            group, pools = shared.groups.of_layer[index], held.pools(index, repeat)
            attend = shared.memory(pools, group, held.is_lent(index))
            more = _given(None if own is None else own[index])
            x = functions[index](layer_weights, x, attend=attend, **more)
            held.keep(index, attend.pools)
        return (x, held.cache()), None

    each = None if given is None else given.reshape(repeats, len(stacked), *given.shape[1:])
    xs = (jnp.arange(repeats, dtype=jnp.int32), moved, each)
    (x, cache), _ = scan(_checkpointed(body, remat), (x, cache), xs)
    return x, cache


def _given(own: jax.Array | None) -> dict[str, jax.Array]:
    return {} if own is None else {"given": own}


def _slots(batch: Batch, cache: KVCache | None, groups: LayerGroups) -> Slots:
    """Per layer group, where everybody's new K and V go; traced once for all its layers."""
    if cache is None and not batch.step_blocks:
        return ()
    size = block_size() if cache is None else cache.block_size

    def own(group: int, window: int | None) -> jax.Array | None:
        if window == STATE:
            return None
        return mesh.gather_tokens(batch.slot_mapping(group, size), batch)

    return tuple(own(group, window) for group, window in enumerate(groups.windows))


def _once(run: Callable, x: jax.Array, shared: _Pass, remat: str | None) -> Callable:
    """A layer as a function of the program, traced once for all layers; XLA inlines it again."""
    if not shared.slots or not is_traced(x):
        return _checkpointed(run, remat)
    return jax.jit(_checkpointed(run, remat))


def _checkpointed(function: Callable, remat: str | None) -> Callable:
    if remat is None:
        return function
    return jax.checkpoint(function, policy=REMAT_POLICIES[remat])


@jax.tree_util.register_pytree_node_class
class _Pools:
    """One layer's pools and, among stacked layers, the number of its first block."""

    def __init__(self, k: Any, v: Any, block_size: int, first_block: Any):
        self.k, self.v, self.block_size, self.first_block = k, v, block_size, first_block

    def tree_flatten(self) -> tuple[tuple, int]:
        return (self.k, self.v, self.first_block), self.block_size

    @classmethod
    def tree_unflatten(cls, block_size: int, children: tuple) -> _Pools:
        k, v, first_block = children
        return cls(k, v, block_size, first_block)


class _Held:
    """What the layers of a pass keep: pools, and without a cache the K and V that others read."""

    def __init__(self, cache: KVCache | None, groups: LayerGroups, num_layers: int):
        self._cache, self._sources = cache, groups.sources[:num_layers]
        self._lent = {source for i, source in enumerate(self._sources) if source != i}
        self._k, self._v = (list(cache.k), list(cache.v)) if cache else ([], [])
        self._dense: dict[int, _Pools | None] = {}

    def is_lent(self, index: int) -> bool:
        """Whether, without a cache, other layers attend to this one's K and V."""
        return self._cache is None and index in self._lent

    def pools(self, index: int, repeat: Any) -> _Pools | None:
        """Those that a layer attends to, in this turn of a scan."""
        source = self._sources[index]
        if self._cache is None:
            return self._dense.get(source)
        k, v = self._k[source], self._v[source]
        first_block = repeat * (pool_size(k) // self._cache.num_repeats)
        return _Pools(k, v, self._cache.block_size, first_block)

    def keep(self, index: int, pools: _Pools | None) -> None:
        """What a layer has written."""
        if self._sources[index] != index:
            return
        if self._cache is None:
            self._dense[index] = pools
        elif pools is not None:
            self._k[index], self._v[index] = pools.k, pools.v

    def cache(self) -> KVCache | None:
        return with_pools(self._cache, self._k, self._v) if self._cache else None


@dataclass(frozen=True)
class _Pass:
    """What all layers of a pass share; `slots` is empty without a cache."""

    batch: Batch
    slots: Slots
    groups: LayerGroups
    options: ExecutionOptions

    def memory(self, pools: _Pools | None, group: int, lent: bool) -> _Attend | _Recall:
        """What a layer of the group remembers by."""
        if self.groups.windows[group] == STATE:
            return _Recall(self.batch, pools, group)
        return _Attend(self, pools, group, lent)


@dataclass
class _Recall:
    """What a layer with state calls: it goes on from its sequences' states, and keeps the new."""

    batch: Batch
    pools: _Pools | None
    group: int

    def __call__(
        self, run: Callable[..., tuple[Array, States]], shapes: Sequence[tuple[int, ...]]
    ) -> Float[Array, "T ..."]:
        """
        Args:
            run: (runs, states) -> what it computes, and the pools of states with the new ones.
            shapes: of one sequence's states on this device.
        """
        pools = self.pools
        if pools is None:
            assert self.batch.segment_ids is None, "no layers with state are trained"
            rows = self.batch.tokens.shape[0]
            zeros = tuple(jnp.zeros((rows, *shape), jnp.float32) for shape in shapes)
            return run(self.batch.runs(None), zeros)[0]
        out, states = run(self.batch.runs(self.group, pools.first_block), pools.k)
        self.pools = _Pools(states, (), pools.block_size, pools.first_block)
        return out


@dataclass
class _Attend:
    """What a layer calls to attend: writes the new K and V, then reads what each query sees."""

    shared: _Pass
    pools: _Pools | None
    group: int
    lent: bool

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"] | None,
        v: Float[Array, "B T K H"] | None,
        *,
        scale: float,
        sinks: Float[Array, " N"] | StackMember | None = None,
        causal: bool = True,
        bias: Float[Array, "N distances"] | None = None,
        new: Projected | None = None,
        cap: float | None = None,
    ) -> Float[Array, "B T N H"]:
        """
        Args:
            v: None beside keys is the keys, of which the layer takes what is values.
            new: what q, k and v come from, where `Projected` says all that was done to them.
        """
        batch, options = self.shared.batch, self.shared.options
        window, kernels = self.shared.groups.windows[self.group], options.kernels
        repeats = options.gqa == "repeat"
        args = AttentionArgs(
            scale, window, taken(sinks), repeats, causal=causal, bias=bias, cap=cap
        )
        if not self.shared.slots:
            k, v = self._dense(k, v)
            keys = mesh.gather_tokens(batch.positions, batch, (mesh.SEQUENCE,))
            in_order = mesh.SEQUENCE not in batch.split
            dense = Dense(batch.positions, keys, batch.context_lens, batch.segment_ids, in_order)
            return attention(q, k, v, dense, args, implementation=kernels)
        pools = self.pools or self._of_step(k)
        sequences = batch.sequences(self.group, pools.first_block)
        if new is not None and not batch.split:
            where = pools.k, pools.v, sequences, args
            if (found := attention_step(new, *where, implementation=kernels)) is not None:
                out, k_pool, v_pool = found
                self.pools = _Pools(k_pool, v_pool, pools.block_size, pools.first_block)
                return out[None]
        if k is not None:
            slots = self.shared.slots[self.group]
            assert slots is not None
            slots = slots + pools.first_block * pools.block_size
            k_pool, v_pool = (
                pool
                if given is None
                else write(pool, mesh.gather_tokens(given, batch), slots, implementation=kernels)
                for pool, given in ((pools.k, k), (pools.v, v))
            )
            self.pools = pools = _Pools(k_pool, v_pool, pools.block_size, pools.first_block)
        k_pool, v_pool = pools.k, pools.v if jax.tree.leaves(pools.v) else pools.k
        out = ragged_attention(q[0], k_pool, v_pool, sequences, args, implementation=kernels)
        return out[None]

    def _of_step(self, k: jax.Array | None) -> _Pools:
        """Pools of the step's own keys and values, where no cache keeps any."""
        assert k is not None
        size = block_size()
        shape = (self.shared.batch.step_blocks, k.shape[2], size, cache_width(k.shape[3]))
        return _Pools(jnp.zeros(shape, k.dtype), jnp.zeros(shape, k.dtype), size, 0)

    def _dense(
        self, k: jax.Array | None, v: jax.Array | None
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """Keys and values of whole sequences: the layer's own, or those of another."""
        if k is None:
            assert self.pools is not None
            return self.pools.k, self.pools.v
        v = k if v is None else v
        k, v = (mesh.gather_tokens(a, self.shared.batch, (mesh.SEQUENCE,)) for a in (k, v))
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        self.pools = _Pools(k, v, 0, 0) if self.lent else None
        return k, v


def stack_layers(weights: dict[str, Any], period: int) -> dict[str, Any]:
    """Weights for `layers="scan"`: layer i's arrays become row i // period of group i % period."""
    layers = weights["layers"]
    stacked = tuple(
        {
            key: stack_leaves([layer[key] for layer in layers[index::period]])
            for key in layers[index]
        }
        for index in range(period)
    )
    rest = {name: value for name, value in weights.items() if name != "layers"}
    return rest | {"stacked_layers": stacked}


def unstack_layers(weights: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `stack_layers`."""
    stacked = weights["stacked_layers"]

    def member(leaf: Any, repeat: int) -> Any:
        return leaf.member(repeat) if _is_mixed(leaf) else leaf[repeat]

    layers = tuple(
        jax.tree.map(partial(member, repeat=repeat), group, is_leaf=_is_mixed)
        for repeat in range(_num_repeats(stacked))
        for group in stacked
    )
    rest = {name: value for name, value in weights.items() if name != "stacked_layers"}
    return rest | {"layers": layers}


def _num_repeats(stacked: tuple[LayerWeights, ...]) -> int:
    return jax.tree.leaves(stacked, is_leaf=_is_mixed)[0].shape[0]


def _is_mixed(leaf: Any) -> bool:
    return isinstance(leaf, MixedStack)
