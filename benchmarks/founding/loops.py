"""The loops of the founding documents, mistakes included: every token is a new shape.

They bypass the engine on purpose. The product pads to a few shapes, so it cannot show what it costs
not to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import ExecutionOptions, Model, decode_step, prefill
from rooflax.bench.timeline import Timeline
from rooflax.nn.batch import Batch
from rooflax.nn.kv_cache import KVCache, allocate, with_pools

Loop = Callable[[list[int], int], Timeline]
"""(prompt, number of new tokens) -> when they came."""


def uncached(model: Model, options: ExecutionOptions, *, recompute_rope: bool = False) -> Loop:
    """Every token runs all tokens again, in an array one longer than the one before."""

    @jax.jit
    def next_token(model: Model, tokens: jax.Array) -> jax.Array:
        if recompute_rope:
            theta = model.config.rope_theta
            rope = RecomputedRope(model.config.head_dim, model.max_model_len, theta)
            model = replace(model, rope=rope)
        hidden, _ = model.forward(Batch.dense(tokens), options=options)
        return model.logits(hidden[:, -1], options=options).argmax(-1)

    def run(prompt: list[int], count: int) -> Timeline:
        start, ids, arrivals = time.perf_counter(), list(prompt), []
        for _ in range(count):
            ids.append(_on_host(next_token(model, np.array([ids], np.int32))))
            arrivals.append(time.perf_counter())
        return Timeline(start, [arrivals], [tuple(ids[len(prompt) :])])

    return run


def growing_cache(model: Model, options: ExecutionOptions) -> Loop:
    """A KV cache that is one token longer at every step, as a cache cut to its length is."""

    @jax.jit
    def first_token(model: Model, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
        empty = _exact_cache(model, tokens.shape[1])
        logits, cache = prefill(model, empty, tokens, options=options)
        return logits.argmax(-1), cache

    @jax.jit
    def next_token(
        model: Model, cache: KVCache, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        logits, cache = decode_step(model, _one_longer(cache), token, position, options=options)
        return logits.argmax(-1), cache

    def run(prompt: list[int], count: int) -> Timeline:
        start = time.perf_counter()
        token, cache = first_token(model, np.array([prompt], np.int32))
        ids, arrivals = [_on_host(token)], [time.perf_counter()]
        for position in range(len(prompt), len(prompt) + count - 1):
            last, where = (np.array([value], np.int32) for value in (ids[-1], position))
            token, cache = next_token(model, cache, last, where)
            ids.append(_on_host(token))
            arrivals.append(time.perf_counter())
        return Timeline(start, [arrivals], [tuple(ids)])

    return run


def make(name: str, model: Model, options: ExecutionOptions) -> Loop:
    """A loop by its name: "uncached", "recomputed_rope" or "growing_cache"."""
    if name == "growing_cache":
        return growing_cache(model, options)
    recompute = {"uncached": False, "recomputed_rope": True}[name]
    return uncached(model, options, recompute_rope=recompute)


@dataclass(frozen=True)
class RecomputedRope:
    """A RoPE table that computes every position there is whenever a layer reads it."""

    head_dim: int
    length: int
    theta: float

    @property
    def cos(self) -> jax.Array:
        return jnp.cos(self._angles())

    @property
    def sin(self) -> jax.Array:
        return jnp.sin(self._angles())

    def _angles(self) -> jax.Array:
        exponent = jnp.arange(0, self.head_dim, 2, dtype=jnp.float32) / self.head_dim
        positions = jnp.arange(self.length, dtype=jnp.float32)
        return jnp.outer(positions, 1.0 / self.theta**exponent)


def _on_host(token: jax.Array) -> int:
    """The only row's id; indexing the array on the device would compile a program for it."""
    return int(np.asarray(token)[0])


def _exact_cache(model: Model, length: int) -> KVCache:
    """For one sequence of `length` tokens: one token per block, and the scratch block."""
    config = model.config
    blocks = (1 + length,) * len(config.groups.windows)
    return allocate(config.groups, blocks, config.num_kv_heads, config.head_dim, block_size=1)


def _one_longer(cache: KVCache) -> KVCache:
    def grown(pools: Any) -> list[jax.Array]:
        return [jnp.pad(pool, ((0, 1), (0, 0), (0, 0), (0, 0))) for pool in pools]

    return with_pools(cache, grown(cache.k), grown(cache.v))
