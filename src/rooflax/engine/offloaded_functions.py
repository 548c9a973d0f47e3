"""`OffloadedFunctions`: the step functions of a model some of whose layers are offloaded.

A step is the embedding, then every layer by a program that all layers of a group share, then what
the step function does with the hidden states. The number of programs does not grow with the depth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rooflax.engine import packing
from rooflax.engine.buckets import StepKind
from rooflax.engine.device_steps import StepInput
from rooflax.engine.step_functions import StepFunctions
from rooflax.models.offloading import AnyModel, OffloadedModel
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import KVCache, with_pools


def step_functions(
    model: AnyModel, options: ExecutionOptions, mesh: Mesh | None, max_steps: int, **run: Any
) -> StepFunctions | OffloadedFunctions:
    """Step functions of this model; the arguments of `StepFunctions`."""
    if isinstance(model, OffloadedModel):
        assert mesh is None
        assert max_steps == 1
        return OffloadedFunctions(options, **run)
    return StepFunctions(options, mesh, max_steps, **run)


class OffloadedFunctions:
    """As `StepFunctions`, of an `OffloadedModel`; one step per dispatch."""

    def __init__(self, options: ExecutionOptions, **run: Any):
        self._whole = whole = StepFunctions(options, None, max_steps=1, **run)
        one_step = whole.by_kind | {StepKind.DECODE: whole.by_kind[StepKind.STEP]}
        self.by_kind: dict[StepKind, Any] = {k: self._by_layer(f) for k, f in one_step.items()}
        self.score, self.logits = self._by_layer(whole.score), self._by_layer(whole.logits)
        self.assign_slot, self.copy = whole.assign_slot, whole.copy

    def _by_layer(self, finish: Callable) -> Callable:
        def run(model: OffloadedModel, carry: Any, *host: Any) -> tuple[Any, Any]:
            cache, rest = carry
            hidden, cache = self._layers(model, cache, host)
            out, (_, rest) = finish(model.ends, (None, rest), *_with_hidden(host, hidden))
            return out, (cache, rest)

        return run

    def _layers(
        self, model: OffloadedModel, cache: KVCache | None, host: tuple[Any, ...]
    ) -> tuple[jax.Array, KVCache | None]:
        """Hidden states behind the last layer; of padding alone, one layer of each group runs."""
        started, count = time.perf_counter(), model.config.num_layers
        hidden, batch = self._whole.embed(model.ends, None, *host)
        k, v = (list(cache.k), list(cache.v)) if cache else ([], [])
        is_padding = _is_padding(host)
        groups = range(len(model.config.groups.windows))
        of_layer = model.config.groups.of_layer
        for index in map(of_layer.index, groups) if is_padding else range(count):
            is_offloaded = index in model.plan.offloaded
            weights = model.stream.take(index) if is_offloaded else model.layers[index]
            part = model.layer(index, weights)
            kept = None
            if cache is not None:
                pools = {"k": (k[index],), "v": (v[index],), "groups": part.config.groups}
                kept = replace(cache, **pools)
            group = model.group(index)
            hidden, kept = self._whole.layer(part, (hidden, kept), _of_group(batch, group))
            if kept is not None:
                k[index], v[index] = kept.k[0], kept.v[0]
            if is_offloaded:
                jax.block_until_ready((hidden, kept))
                model.stream.give_back()
        if not is_padding:
            jax.block_until_ready(hidden)
            model.counts.num_steps += 1
            model.counts.num_bytes += model.plan.bytes_per_step
            model.counts.seconds += time.perf_counter() - started
        return hidden, with_pools(cache, k, v) if cache else None


def _of_group(batch: Batch, group: int) -> Batch:
    """The batch of a model whose layers are of one group."""
    one = slice(group, group + 1)
    return replace(
        batch, block_tables=batch.block_tables[one], first_positions=batch.first_positions[one]
    )


def _with_hidden(host: tuple[Any, ...], hidden: jax.Array) -> tuple[Any, ...]:
    step = host[0]
    return (replace(step, hidden=hidden),) if isinstance(step, StepInput) else (*host, hidden)


def _is_padding(host: tuple[Any, ...]) -> bool:
    """Whether a step is there to be compiled and no more."""
    step = host[0]
    return isinstance(step, StepInput) and not np.any(step.rows[:, packing.QUERY_LEN])
