"""`PoolingFeature`: an engine that embeds. A step gives a vector where a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.engine import packing
from rooflax.engine.device_steps import Carry, StepInput, are_finite, last_hidden
from rooflax.engine.features.feature import CallTimes, Feature
from rooflax.engine.sequence import FeatureState, Sequence
from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.pooler import Pooler
from rooflax.nn.shards import Shards

if TYPE_CHECKING:
    from rooflax.engine.packing import StepResult
    from rooflax.engine.runner import StepCall

Vectors = Float[Array, "B width"]


@dataclass(eq=False)
class Pooled(FeatureState):
    """The vector of a sequence's tokens so far."""

    feature = "pooling"

    vector: np.ndarray


class PoolingFeature(Feature):
    """Pooling as a feature of the engine: every sequence ends with its prompt, and has a vector."""

    state = Pooled

    @classmethod
    def is_for(cls, config: EngineConfig) -> bool:
        return config.pooler is not None

    @classmethod
    def step_function(cls, config: EngineConfig) -> dict[str, Any]:
        return {"run": pooled, "pooler": config.pooler}

    def after_call(self, call: StepCall, result: StepResult, times: CallTimes) -> None:
        pooler = self.core.config.pooler
        if pooler is None or result.vectors is None:
            return
        for row, (sequence, count) in enumerate(zip(call.sequences, call.counts, strict=True)):
            _take_vector(pooler, sequence, result.vectors[row], count)
            if count == sequence.num_uncomputed_tokens and result.is_finite(0, row):
                sequence.finish("stop")


def pooled(
    model: Model,
    carry: Carry,
    step: StepInput,
    *,
    pooler: Pooler,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[tuple[Int[Array, "1 B columns"], Vectors], Carry]:
    """Runs a list of tokens; a vector per sequence, which means something where its tokens end."""
    cache, counts = carry
    batch = step.batch
    hidden, cache = model.forward(batch, cache, options=options, shards=shards)
    if pooler.kind == "tokens":
        logits = model.logits(last_hidden(batch, hidden), options=options, shards=shards)
        vectors = logits[:, jnp.array(pooler.tokens)]
    elif pooler.kind in ("first", "last"):
        rows = last_hidden if pooler.kind == "last" else _first_hidden
        vectors = model.final_hidden(rows(batch, hidden), options)
    else:
        vectors = _over_tokens(pooler, model.final_hidden(hidden, options), batch)
    is_finite = are_finite(batch, hidden) & jnp.all(jnp.isfinite(vectors), axis=1)
    return (packing.pack_pooled(is_finite)[None], vectors), (cache, counts)


def _first_hidden(batch: Batch, hidden: Float[Array, "rows seq D"]) -> Float[Array, "B D"]:
    if batch.query_starts is None:
        return hidden[:, 0]
    return hidden[0, batch.query_starts]


def _over_tokens(pooler: Pooler, hidden: Float[Array, "rows seq D"], batch: Batch) -> Vectors:
    """Over the tokens of each sequence, in float32; of a mean, its tokens' share alone."""
    shares = jnp.ones(batch.tokens.shape, jnp.float32)
    if pooler.kind == "weighted":
        shares = (batch.positions + 1).astype(jnp.float32)
    is_max, count = pooler.kind == "max", len(batch.query_lens)
    if batch.query_starts is None:
        valid = batch.valid[:, :, None]
        if is_max:
            return jnp.max(jnp.where(valid, hidden, -jnp.inf), axis=1)
        sums = jnp.sum(jnp.where(valid, hidden * shares[:, :, None], 0.0), axis=1)
        totals = jnp.sum(jnp.where(batch.valid, shares, 0.0), axis=1)
    else:
        owner, _ = batch.owners
        owner = jnp.where(batch.valid[0], owner, count)  # padding has no sequence
        zeros = jnp.zeros((count, hidden.shape[2]), jnp.float32)
        if is_max:
            most = (zeros - jnp.inf).at[owner].max(hidden[0], mode="drop")
            return jnp.where(batch.query_lens[:, None] > 0, most, 0.0)
        sums = zeros.at[owner].add(hidden[0] * shares[0, :, None], mode="drop")
        totals = jnp.zeros(count, jnp.float32).at[owner].add(shares[0], mode="drop")
    return sums / jnp.maximum(totals, 1.0)[:, None]


def _take_vector(pooler: Pooler, sequence: Sequence, vector: np.ndarray, count: int) -> None:
    """Gives a sequence the vector of all its tokens so far: the last `count` have this one."""
    before = sequence.num_computed_tokens
    if pooler.needs_all and before:
        state = Pooled.of(sequence)
        assert state is not None
        known = state.vector
        if pooler.kind == "first":
            return
        if pooler.kind == "max":
            vector = np.maximum(known, vector)
        else:
            shares = (before, count)
            if pooler.kind == "weighted":  # 1 + 2 + ... of each part
                ends = before * (before + 1), (before + count) * (before + count + 1)
                shares = ends[0], ends[1] - ends[0]
            vector = (known * shares[0] + vector * shares[1]) / sum(shares)
    sequence.features[Pooled] = Pooled(vector)
