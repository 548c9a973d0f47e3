"""Compiles a step's functions (or not), over a mesh (or not)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from rooflax.engine import device_steps
from rooflax.engine.buckets import StepKind
from rooflax.engine.compilation import compiler_options
from rooflax.models.model import Model
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import KVCache
from rooflax.nn.layers import unstack_layers
from rooflax.nn.mesh import cache_spec, shards_of, weights_specs
from rooflax.nn.shards import Shards


class StepFunctions:
    """The step functions for one set of options and one mesh, jitted once per process.

    Args:
        run: runs a list of tokens, as `device_steps.run_step` does, or `pooled`.
        of_run: static arguments of it alone.
    """

    def __init__(
        self,
        options: ExecutionOptions,
        mesh: Mesh | None,
        max_steps: int,
        run: Callable = device_steps.run_step,
        **of_run: Any,
    ):
        static = {"options": options, "shards": shards_of(mesh)}
        compiled = partial(_compiled, jit=options.jit, mesh=mesh, **static)
        step, is_scored = compiled(run, **of_run), compiled(device_steps.scored)
        self.by_kind: dict[StepKind, Any] = {
            StepKind.STEP: step,
            StepKind.DENSE: step,
            StepKind.DECODE: compiled(device_steps.decode, max_steps=max_steps),
            StepKind.VERIFY: compiled(device_steps.verify),
            StepKind.SCORED: is_scored,
            StepKind.SCORED_DENSE: is_scored,
        }
        self.score, self.logits = compiled(device_steps.score), compiled(device_steps.logits)
        self.assign_slot, self.copy = (
            compiled(device_steps.assign_slot),
            compiled(device_steps.copy),
        )
        self.embed, self.layer = compiled(device_steps.embed), compiled(device_steps.layer)


_JITTED: dict[Any, Callable] = {}


def _compiled(function: Callable, *, jit: bool, mesh: Mesh | None, **static: Any) -> Callable:
    key = (function.__name__, jit, mesh, *static.items())
    if key not in _JITTED:
        bound = _named(function, static)
        if mesh is not None:
            bound = _sharded(bound, mesh, static["options"])
        options = compiler_options(static["options"].kernels)
        jitted = jax.jit(bound, donate_argnums=1, compiler_options=options)
        # Eagerly, host arrays go to the device first, as jit would see to.
        _JITTED[key] = jitted if jit else (lambda *args: bound(*jax.device_put(args)))
    return _JITTED[key]


def _named(function: Callable, static: dict[str, Any]) -> Callable:
    def bound(*args: Any) -> Any:
        return function(*args, **static)

    bound.__name__ = function.__name__
    return bound


def _sharded(function: Callable, mesh: Mesh, options: ExecutionOptions) -> Callable:
    """The whole step inside one shard_map: weights and KV split, everything else whole."""
    shards, whole = shards_of(mesh), PartitionSpec()

    def of_one_device(model: Model | None, carry: Any, *rest: Any) -> tuple[Any, Any]:
        if shards.stage > 1:
            model, local_carry = _local_layers(model, options), _with_layers_of(carry, shards.stage)
            out, new = function(model, local_carry, *rest)
            # The new arrays, described as the carry is.
            return out, jax.tree.unflatten(jax.tree.structure(carry), jax.tree.leaves(new))
        return function(model, carry, *rest)

    def run(model: Model | None, carry: Any, *rest: Any) -> Any:
        carry_specs = _by_cache(lambda _: cache_spec(shards), carry, lambda _: whole)
        mapped = jax.shard_map(
            of_one_device,
            mesh=mesh,
            in_specs=(_model_specs(model, shards), carry_specs, *(whole for _ in rest)),
            out_specs=(whole, carry_specs),
            check_vma=False,
        )
        return mapped(model, carry, *rest)

    run.__name__ = function.__name__
    return run


def _by_cache(
    change: Callable[[KVCache], Any], carry: Any, others: Callable[[Any], Any] = lambda part: part
) -> Any:
    """The carry with its cache changed, and its other parts."""
    return jax.tree.map(
        lambda part: change(part) if isinstance(part, KVCache) else others(part),
        carry,
        is_leaf=lambda part: isinstance(part, KVCache),
    )


def _with_layers_of(carry: Any, num_stages: int) -> Any:
    """A stage's own view of the cache: as if its layers were all."""

    def of_stage(cache: KVCache) -> KVCache:
        layers = cache.groups.of_layer
        groups = replace(cache.groups, of_layer=layers[: len(layers) // num_stages])
        return replace(cache, groups=groups)

    return _by_cache(of_stage, carry)


def _local_layers(model: Model | None, options: ExecutionOptions) -> Model | None:
    """A stage's layers; stacked ones are one of each but for a scan."""
    if model is None or options.layers == "scan":
        return model
    return replace(model, weights=unstack_layers(model.weights))


def _model_specs(model: Model | None, shards: Shards) -> Model | None:
    """A Model whose leaves say where each array is split."""
    if model is None:
        return None
    rope = jax.tree.map(lambda _: PartitionSpec(), model.rope)
    return replace(model, weights=weights_specs(model.table, model.weights, shards), rope=rope)
