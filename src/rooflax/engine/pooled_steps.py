"""The step of an engine that embeds: forward, and a vector where a sequence ends. No token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.engine import packing
from rooflax.engine.sequence import Sequence
from rooflax.engine.steps import Carry, StepInput, are_finite, last_hidden
from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.pooler import Pooler
from rooflax.nn.shards import Shards

Vectors = Float[Array, "B width"]


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
    if pooler.kind == "mean":
        vectors = _mean(model.final_hidden(hidden, options), batch)
    elif pooler.kind == "tokens":
        logits = model.logits(last_hidden(batch, hidden), options=options, shards=shards)
        vectors = logits[:, jnp.array(pooler.tokens)]
    else:
        vectors = model.final_hidden(last_hidden(batch, hidden), options)
    is_finite = are_finite(batch, hidden) & jnp.all(jnp.isfinite(vectors), axis=1)
    return (packing.pack_pooled(is_finite)[None], vectors), (cache, counts)


def _mean(hidden: Float[Array, "rows seq D"], batch: Batch) -> Vectors:
    """Over the tokens of each sequence, in float32."""
    counts = jnp.maximum(batch.query_lens, 1).astype(jnp.float32)[:, None]
    if batch.query_starts is None:
        return jnp.sum(jnp.where(batch.valid[:, :, None], hidden, 0.0), axis=1) / counts
    owner, _ = batch.owners
    owner = jnp.where(batch.valid[0], owner, len(batch.query_lens))  # padding is nobody's
    sums = jnp.zeros((len(batch.query_lens), hidden.shape[2]), jnp.float32)
    return sums.at[owner].add(hidden[0], mode="drop") / counts


def take_vector(pooler: Pooler, sequence: Sequence, vector: np.ndarray, count: int) -> None:
    """Gives a sequence the vector of its next `count` tokens; a mean is that of all so far."""
    before = sequence.num_computed_tokens
    if pooler.kind == "mean" and before:
        assert sequence.vector is not None
        vector = (sequence.vector * before + vector * count) / (before + count)
    sequence.vector = vector
