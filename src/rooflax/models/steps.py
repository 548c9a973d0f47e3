"""`prefill` and `decode_step`: a model and a cache, for loops of your own.

Both are pure and can be jitted, with the model as an argument. Each row of the cache owns its
blocks, one after the other; sharing blocks between requests is the engine's business.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.errors import RequestError
from rooflax.models.model import Model, resolve_max_model_len
from rooflax.models.offloading import AnyModel, whole
from rooflax.nn.batch import Batch
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache, allocate, pool_size
from rooflax.nn.layout import STATE, ceil_div
from rooflax.ops.accelerator import block_size


def new_cache(
    model: AnyModel,
    rows: int = 1,
    max_tokens: int | None = None,
    *,
    dtype: str = "float32",
    options: ExecutionOptions = DEFAULT_OPTIONS,
) -> KVCache:
    """An empty cache for `rows` sequences of up to `max_tokens` tokens (default: the model's).

    Raises:
        RequestError: rows or max_tokens below 1, or more tokens than the model takes; or layers
            that are offloaded, which only an engine runs.
    """
    model = whole(model)
    config = model.config
    if rows < 1:
        raise RequestError(f"rows is {rows}; a cache needs at least 1.")
    length = model.max_model_len if max_tokens is None else max_tokens
    blocks = ceil_div(resolve_max_model_len(config, length), block_size())
    windows = config.groups.windows
    return allocate(
        config.groups,
        tuple(1 + rows * (1 if window == STATE else blocks) for window in windows),
        block_size=block_size(),
        dtype=dtype,
        stacked=options.layers == "scan",
    )


def prefill(
    model: Model,
    cache: KVCache,
    tokens: Int[Array, "rows seq"],
    lengths: Int[Array, " rows"] | None = None,
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
) -> tuple[Float[Array, "rows vocab"], KVCache]:
    """Runs prompts from position 0.

    Args:
        tokens: prompts, padded at the end.
        lengths: real tokens per row; None is all of them.

    Returns:
        Float32 logits that follow each row's last real token, and the cache.

    Raises:
        RequestError: another number of rows than the cache has, or more tokens than it holds.
    """
    rows, seq = tokens.shape
    if lengths is None:
        lengths = jnp.full((rows,), seq, jnp.int32)
    batch = _batch(cache, tokens, jnp.zeros(rows, jnp.int32), lengths.astype(jnp.int32))
    hidden, new = model.forward(batch, cache, options=options)
    last = hidden[0, jnp.arange(rows, dtype=jnp.int32) * seq + lengths - 1]
    return model.logits(last, options=options), cast(KVCache, new)


def decode_step(
    model: Model,
    cache: KVCache,
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
) -> tuple[Float[Array, "rows vocab"], KVCache]:
    """Runs one more token per row.

    Args:
        tokens: one id per row.
        positions: that token's position, i.e. how many tokens the row had before.

    Returns:
        Float32 logits that follow it, and the cache.
    """
    batch = _batch(cache, tokens[:, None], positions, jnp.ones_like(positions))
    hidden, new = model.forward(batch, cache, options=options)
    return model.logits(hidden[0], options=options), cast(KVCache, new)


def _batch(cache: KVCache, tokens: jax.Array, positions: jax.Array, lens: jax.Array) -> Batch:
    """Rows of tokens as a list, the padding at each one's end included.

    Args:
        positions, lens: of each row, that of its first token, and how many are real.
    """
    rows, seq = tokens.shape
    tables = []
    for group, window in enumerate(cache.groups.windows):
        index = cache.groups.of_layer.index(group) % len(cache.k)
        per_layer = pool_size(cache.k[index]) // cache.num_repeats
        fits = window == STATE or seq <= (per_layer - 1) // rows * cache.block_size
        if (per_layer - 1) % rows or not fits:
            raise RequestError(
                f"{rows} rows of {seq} tokens do not fit a cache of {per_layer - 1} blocks of "
                f"{cache.block_size} tokens; make it with new_cache(model, rows, max_tokens)."
            )
        blocks = np.arange(1, per_layer, dtype=np.int32)
        tables.append(jnp.asarray(blocks.reshape(rows, -1)))
    first = jnp.zeros(rows, jnp.int32)
    starts = jnp.arange(rows, dtype=jnp.int32) * seq
    firsts = (first,) * len(tables)
    flat = tokens.reshape(-1)
    return Batch.ragged(flat, starts, lens, positions, tuple(tables), firsts, longest=seq)
