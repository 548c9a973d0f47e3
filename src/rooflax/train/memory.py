"""The memory that a run takes, by part, before it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.models.model import Model
from rooflax.nn.host_memory import give_back_freed, rss_bytes
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import PREFERENCES, TrainConfig
from rooflax.train.data import PackedBatch
from rooflax.train.devices import ONE_DEVICE, DeviceMesh
from rooflax.train.loop import Rollouts, make_loss
from rooflax.train.preferences import PairBatch
from rooflax.train.step import init_state, make_optimizer, make_train_step


def training_memory(
    model: Model, config: TrainConfig, rollouts: Rollouts | None = None
) -> Mapping[str, int]:
    """Bytes by part, on each device: compiles the step, and runs nothing."""
    model = model.stacked() if config.layers == "scan" else model
    optimizer = make_optimizer(model.table, model.weights, config)
    lora = LoraTraining(model, config) if config.trains_adapter else None
    trained = model.weights if lora is None else lora.start()
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), trained)
    fixed: Any = model.rope if lora is None else model
    devices = ONE_DEVICE
    if config.mesh is not None:
        devices = DeviceMesh(config.mesh, model, weights, fixed)
    fixed = devices.placed_fixed(fixed)
    state = jax.eval_shape(lambda weights: init_state(weights, optimizer), weights)
    if (shardings := devices.shardings(state)) is not None:
        state = jax.tree.map(
            lambda like, sharding: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding),
            state,
            shardings,
        )
    rows = (config.rows_per_step, config.seq_len)
    kinds = (jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)
    batch: Any = PackedBatch(*(jax.ShapeDtypeStruct(rows, kind) for kind in kinds))
    if config.train_mode in PREFERENCES:
        batch = PairBatch(
            *batch,
            reference=jax.ShapeDtypeStruct(rows[:1], jnp.float32),
            share=jax.ShapeDtypeStruct(rows, jnp.float32),
        )
    if rollouts is not None:
        batch = rollouts.shapes()
    loss = (make_loss if rollouts is None else rollouts.loss)(model, config, lora)
    step: Any = make_train_step(model, optimizer, config, lora, loss, devices)
    program = step.lower(state, fixed, batch).compile()
    give_back_freed()  # as a run does before its first step
    analysis: Any = program.memory_analysis()
    start = _bytes(model.weights)
    # Without an adapter all of them are given up.
    base = {} if lora is None else {"starting weights": _bytes(fixed.weights)}
    cache = {} if rollouts is None else {"the sampler's KV cache": rollouts.cache_bytes()}
    return base | {
        "trained weights, float32": _bytes(state.weights),
        "optimizer moments": _bytes(state.opt_state),
        "gradients, activations and logits": analysis.temp_size_in_bytes,
        **cache,
        "the program": max(0, (rss_bytes() or start) - start),
    }


def _bytes(tree: Any) -> int:
    """On a device."""

    def of(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))
