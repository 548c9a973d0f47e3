"""The device's side of a step: forward, sampling, and several decode steps in one loop.

Pure functions of fixed shape. `StepFunctions` compiles them (or not), over a mesh (or not).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import KVCache
from rooflax.nn.mesh import CACHE_SPEC, Shards, tensor_shards, weight_spec
from rooflax.nn.weights import assemble, slots
from rooflax.ops.control import fori_loop
from rooflax.ops.sampling import Sampled, Sampling, TokenCounts, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInput:
    """A batch and what its rows are for.

    Attributes:
        batch: the tokens.
        slots: each row's row in `TokenCounts`; padding has the last one.
        sampling: how each row chooses.
        fresh: rows that begin a sequence.
        samples: rows whose last token is followed by a new one.
    """

    batch: Batch
    slots: Int[Array, " B"]
    sampling: Sampling
    fresh: Bool[Array, " B"]
    samples: Bool[Array, " B"]


Carry = tuple[KVCache | None, TokenCounts]


def prefill(
    model: Model, carry: Carry, step: StepInput, *, options: ExecutionOptions, shards: Shards | None
) -> tuple[Sampled, Carry]:
    """Runs a chunk of every row's prompt, and chooses the token after it where a prompt ends."""
    cache, counts = carry
    batch = step.batch
    counts = counts.add_prompt(step.slots, step.fresh, batch.tokens, batch.valid)
    sampled, cache = _run(model, cache, counts, step, options, shards)
    counts = counts.add_generated(step.slots, sampled.tokens, step.samples)
    return sampled, (cache, counts)


def rerun(
    model: Model, carry: Carry, step: StepInput, *, options: ExecutionOptions, shards: Shards | None
) -> tuple[Sampled, Carry]:
    """Without a cache: runs whole sequences again for one more token each."""
    sampled, _ = _run(model, None, carry[1], step, options, shards)
    return sampled, (None, carry[1].add_generated(step.slots, sampled.tokens, step.samples))


def decode(
    model: Model,
    carry: Carry,
    step: StepInput,
    num_steps: Int[Array, ""],
    *,
    max_steps: int,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Sampled, Carry]:
    """Runs `num_steps` tokens per row, each the one chosen before it.

    Args:
        num_steps: at most `max_steps`; traced, so one program serves every count.

    Returns:
        What was chosen, with a leading axis of max_steps, and the carry.
    """

    def one(index: jax.Array, state: Any) -> Any:
        batch, cache, counts, out = state
        now = replace(step, batch=batch)
        sampled, cache = _run(model, cache, counts, now, options, shards)
        counts = counts.add_generated(step.slots, sampled.tokens, step.samples)
        out = jax.tree.map(lambda all_, new: all_.at[index].set(new), out, sampled)
        return _advance(batch, sampled.tokens), cache, counts, out

    cache, counts = carry
    rows = step.slots.shape[0]
    shapes = jax.eval_shape(
        partial(_run, options=options, shards=shards), model, cache, counts, step
    )
    out = jax.tree.map(lambda s: jnp.zeros((max_steps, *s.shape), s.dtype), shapes[0])
    assert shapes[0].tokens.shape == (rows,)
    start = (step.batch, cache, counts, out)
    _, cache, counts, out = fori_loop(0, num_steps, one, start)
    return out, (cache, counts)


def score(
    model: Model,
    carry: tuple[None, tuple[()]],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Float[Array, "B T"], tuple[None, tuple[()]]]:
    """Log-probability of the token after each; the last column means nothing.

    Logits exist for SCORED_AT_ONCE tokens at a time.
    """
    batch = Batch.dense(tokens, lengths=lengths)
    hidden, _ = model.forward(batch, None, options=options, shards=shards)
    rows, seq, width = hidden.shape
    chunk = min(SCORED_AT_ONCE, rows * seq)
    padding = -(rows * seq) % chunk
    flat = jnp.pad(hidden.reshape(-1, width), ((0, padding), (0, 0)))
    targets = jnp.pad(jnp.roll(tokens, -1, axis=1).reshape(-1), (0, padding))

    def score_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(part[0], options=options, shards=shards)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(logprobs, part[1][:, None], axis=-1)[:, 0]

    parts = (flat.reshape(-1, chunk, width), targets.reshape(-1, chunk))
    scores = jax.lax.map(score_chunk, parts).reshape(-1)[: rows * seq]
    return scores.reshape(rows, seq), carry


def _run(
    model: Model,
    cache: KVCache | None,
    counts: TokenCounts,
    step: StepInput,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Sampled, KVCache | None]:
    """Forward, the last token's logits, and a choice for every row."""
    batch = step.batch
    hidden, cache = model.forward(batch, cache, options=options, shards=shards)
    last = jnp.maximum(batch.query_lens - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    logits = model.logits(hidden, options=options, shards=shards)
    sampled = sample(
        logits,
        step.sampling,
        batch.context_lens,
        counts,
        step.slots,
        implementation=options.kernels,
    )
    return sampled, cache


def _advance(batch: Batch, tokens: Int[Array, " B"]) -> Batch:
    """The decode batch one token on; empty rows stay empty."""
    return replace(
        batch,
        tokens=tokens[:, None],
        positions=batch.positions + batch.query_lens[:, None],
        context_lens=batch.context_lens + batch.query_lens,
    )


SCORED_AT_ONCE = 256
"""Tokens whose logits exist at the same time while scoring."""


class StepFunctions:
    """The step functions for one set of options and one mesh, jitted once per process."""

    def __init__(self, options: ExecutionOptions, mesh: Mesh | None, max_steps: int):
        static = {"options": options, "shards": tensor_shards(mesh)}
        self.prefill = _compiled(prefill, options.jit, mesh, **static)
        self.rerun = _compiled(rerun, options.jit, mesh, **static)
        self.score = _compiled(score, options.jit, mesh, **static)
        self.decode = _compiled(decode, options.jit, mesh, max_steps=max_steps, **static)


_JITTED: dict[Any, Callable] = {}


def _compiled(function: Callable, jit: bool, mesh: Mesh | None, **static: Any) -> Callable:
    key = (function.__name__, jit, mesh, *static.items())
    if key not in _JITTED:
        bound = _named(function, static)
        if mesh is not None:
            bound = _sharded(bound, mesh)
        _JITTED[key] = jax.jit(bound, donate_argnums=1) if jit else _eager(bound)
    return _JITTED[key]


def _eager(function: Callable) -> Callable:
    """Host arrays go to the device first, as jit would see to."""
    return lambda *args: function(*jax.device_put(args))


def _named(function: Callable, static: dict[str, Any]) -> Callable:
    def bound(*args: Any) -> Any:
        return function(*args, **static)

    bound.__name__ = function.__name__
    return bound


def _sharded(function: Callable, mesh: Mesh) -> Callable:
    """The whole step inside one shard_map: weights and KV split, everything else whole."""

    def run(model: Model, carry: Carry, *rest: Any) -> Any:
        whole = PartitionSpec()
        carry_specs = jax.tree.map(lambda _: whole, carry)
        if carry[0] is not None:
            pools = jax.tree.map(lambda _: CACHE_SPEC, carry[0])
            carry_specs = (pools, carry_specs[1])
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(model_specs(model), carry_specs, *(whole for _ in rest)),
            out_specs=(whole, carry_specs),
            check_vma=False,
        )
        return mapped(model, carry, *rest)

    run.__name__ = function.__name__
    return run


def model_specs(model: Model) -> Model:
    """A Model whose leaves say where each array is split."""
    config = model.config
    specs = assemble(
        config.num_layers,
        ((slot, weight_spec(slot.weight)) for slot in slots(model.table, config.num_layers)),
    )
    if "stacked_layers" in model.weights:
        period = config.groups.period
        layers = specs.pop("layers")[:period]
        specs["stacked_layers"] = tuple(
            {name: PartitionSpec(None, *spec) for name, spec in layer.items()} for layer in layers
        )
    rope = jax.tree.map(lambda _: PartitionSpec(), model.rope)
    return replace(model, weights=specs, rope=rope)
