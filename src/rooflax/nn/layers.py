"""Running a model's layers: unrolled in the program, or scanned over stacked weights.

A layer is a function of its weights, the hidden states and its `LayerMemory`; it gives the new
hidden states and its new pools. This module repeats it and threads the KV cache through.
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
from rooflax.nn.kv_cache import KVCache, LayerGroups, pool_size, with_pools
from rooflax.nn.layer_memory import LayerMemory, LayerPools, Slots, StepMemory
from rooflax.nn.layout import STATE
from rooflax.ops.accelerator import block_size
from rooflax.ops.control import is_traced, scan
from rooflax.ops.linear.api import LINEAR
from rooflax.ops.weights import Composite, MixedStack, at, stack_leaves

LayerWeights = dict[str, Any]
Layer = Callable[..., tuple[Float[Array, "B T D"], LayerPools | None]]
PerLayerInput = Float[Array, "layers B T W"] | None

REMAT_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
"""Values of a layer's forward pass that the backward pass reads; it recomputes the others."""


@dataclass(frozen=True)
class _Pass:
    """One run through the layers: their functions, and what all of them read.

    Attributes:
        functions: one per layer, the same object for layers of one kind.
        lent: layers whose K and V others attend to without a cache.
        remat: a name in REMAT_POLICIES; None keeps every intermediate.
    """

    functions: Sequence[Layer]
    step: StepMemory
    lent: frozenset[int]
    remat: str | None

    @property
    def groups(self) -> LayerGroups:
        return self.step.groups

    def memory(self, index: int, pools: LayerPools | None) -> LayerMemory:
        """The memory of layer `index`, which reads these pools."""
        return LayerMemory(self.step, pools, self.groups.of_layer[index], index in self.lent)


def run_layers(
    functions: Sequence[Layer],
    weights: dict[str, Any],
    state: mesh.StageState,
    batch: Batch,
    *,
    groups: LayerGroups,
    options: ExecutionOptions,
    shards: mesh.Shards | None = None,
    remat: str | None = None,
    per_layer_input: PerLayerInput = None,
) -> mesh.StageState:
    """Hidden states and cache after all layers; pipeline stages run one after the other.

    Args:
        functions: per layer (its weights, x, memory, per_layer_input=) -> (x, pools), one object
            for all layers of a kind; see `LayerMemory`.
        weights: with "layers" (a tuple, one dict per layer) or "stacked_layers" (one dict per
            layer of the period, each array with a leading axis of repeats).
        state: the embedding, replaced by `batch.hidden` if that is given, and the paged cache,
            stacked exactly when the weights are; a cache of None runs whole sequences.
        remat: name in REMAT_POLICIES; None keeps every intermediate for the backward pass.
        per_layer_input: one input per layer; None for models without.
    """
    run = _scan if "stacked_layers" in weights else _unrolled
    layers = weights.get("stacked_layers") or weights["layers"]
    x, cache = state
    sources = groups.sources[: len(layers)]
    lent = (source for index, source in enumerate(sources) if source != index)
    step = StepMemory(batch, _slots(batch, cache, groups), groups, options)
    whole = _Pass(functions, step, frozenset(lent if cache is None else ()), remat)
    x = x if batch.hidden is None else batch.hidden

    def stage(x: jax.Array, cache: KVCache | None) -> mesh.StageState:
        return run(whole, layers, (x, cache), mesh.local_layers(per_layer_input, shards))

    if shards is None or shards.stage == 1:
        return stage(x, cache)
    return mesh.in_stages(stage, x, cache, shards)


def _unrolled(
    whole: _Pass, layers: Sequence, state: mesh.StageState, inputs: PerLayerInput
) -> mesh.StageState:
    x, cache = state
    pools, groups = _layer_pools(cache, len(layers), 0), whole.groups

    def run(
        w: LayerWeights, x: jax.Array, inputs: Any, pools: LayerPools | None, *, index: int
    ) -> tuple[jax.Array, LayerPools | None]:
        return whole.functions[index](w, x, whole.memory(index, pools), **_keyword(inputs))

    kinds = [
        (function, groups.of_layer[index], index in whole.lent)
        for index, function in enumerate(whole.functions)
    ]
    runs = {kind: _once(partial(run, index=index), x, whole) for index, kind in enumerate(kinds)}
    for index, layer_weights in enumerate(layers):
        layer_input = None if inputs is None else inputs[index]
        source = groups.sources[index]
        x, written = runs[kinds[index]](layer_weights, x, layer_input, pools[source])
        if source == index:
            pools[index] = written
    return x, _with_layer_pools(cache, pools)


def _scan(
    whole: _Pass, stacked: tuple[LayerWeights, ...], state: mesh.StageState, inputs: PerLayerInput
) -> mesh.StageState:
    """One turn of the scan runs the period once; the pools are carried in place.

    Weights stay in their stacks where a kernel reads them there; the rest is small.
    """
    repeats = _num_repeats(stacked)
    reads_stack = LINEAR.preferred(whole.step.options.kernels).reads_stacks
    kept = [
        {
            key: w
            for key, w in layer.items()
            if isinstance(w, MixedStack | Composite) or reads_stack(w)
        }
        for layer in stacked
    ]
    moved = [{k: w for k, w in stacked[i].items() if k not in kept[i]} for i in range(len(kept))]

    def body(carry: mesh.StageState, xs: Any) -> tuple[mesh.StageState, None]:
        x, cache = carry
        repeat, slices, layer_inputs = xs
        pools = _layer_pools(cache, len(slices), repeat)
        for index, layer_weights in enumerate(slices):
            layer_weights |= {key: at(w, repeat) for key, w in kept[index].items()}
            source = whole.groups.sources[index]
            memory = whole.memory(index, pools[source])
            keyword = _keyword(None if layer_inputs is None else layer_inputs[index])
            x, written = whole.functions[index](layer_weights, x, memory, **keyword)
            if source == index:
                pools[index] = written
        return (x, _with_layer_pools(cache, pools)), None

    grouped = None if inputs is None else inputs.reshape(repeats, len(stacked), *inputs.shape[1:])
    xs = (jnp.arange(repeats, dtype=jnp.int32), moved, grouped)
    return scan(_checkpointed(body, whole.remat), state, xs)[0]


def _keyword(layer_input: jax.Array | None) -> dict[str, jax.Array]:
    return {} if layer_input is None else {"per_layer_input": layer_input}


def _slots(batch: Batch, cache: KVCache | None, groups: LayerGroups) -> Slots:
    """Per layer group, where all shards' new K and V go; traced once for all its layers."""
    if cache is None and not batch.step_blocks:
        return ()
    size = block_size() if cache is None else cache.block_size
    return tuple(
        None if window == STATE else mesh.gather_tokens(batch.slot_mapping(group, size), batch)
        for group, window in enumerate(groups.windows)
    )


def _layer_pools(cache: KVCache | None, num_layers: int, repeat: Any) -> list[LayerPools | None]:
    """Each layer's pools in this turn of a scan; without a cache they come with the layers."""
    if cache is None:
        return [None] * num_layers
    return [
        LayerPools(k, v, repeat * (pool_size(k) // cache.num_repeats), cache.block_size)
        if jax.tree.leaves(k)
        else None
        for k, v in zip(cache.k, cache.v, strict=True)
    ]


def _with_layer_pools(cache: KVCache | None, pools: list[LayerPools | None]) -> KVCache | None:
    if cache is None:
        return None
    k, v = ([getattr(each, key) if each else () for each in pools] for key in ("k", "v"))
    return with_pools(cache, k, v)


def _once(run: Callable, x: jax.Array, whole: _Pass) -> Callable:
    """A layer as a function of the program, traced once for all layers; XLA inlines it again."""
    run = _checkpointed(run, whole.remat)
    return jax.jit(run) if whole.step.slots and is_traced(x) else run


def _checkpointed(function: Callable, remat: str | None) -> Callable:
    if remat is None:
        return function
    return jax.checkpoint(function, policy=REMAT_POLICIES[remat])


def stack_layers(weights: dict[str, Any], period: int) -> dict[str, Any]:
    """Weights for `layers="scan"`: layer i's arrays become row i // period of layer i % period."""
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
        jax.tree.map(partial(member, repeat=repeat), layer, is_leaf=_is_mixed)
        for repeat in range(_num_repeats(stacked))
        for layer in stacked
    )
    rest = {name: value for name, value in weights.items() if name != "stacked_layers"}
    return rest | {"layers": layers}


def _num_repeats(stacked: tuple[LayerWeights, ...]) -> int:
    return jax.tree.leaves(stacked, is_leaf=_is_mixed)[0].shape[0]


def _is_mixed(leaf: Any) -> bool:
    return isinstance(leaf, MixedStack)
