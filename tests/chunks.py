"""A model's logits for prompts that are cut into chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import Model, new_cache
from rooflax.nn.batch import Batch
from rooflax.nn.layout import STATE


@partial(jax.jit, static_argnames="longest")
def _forward(model, cache, tokens, longest):
    hidden, cache = model.forward(Batch.ragged(*tokens, longest=longest), cache)
    return model.logits(hidden), cache


def chunked_logits(model: Model, tokens: np.ndarray, ends: list[int]) -> np.ndarray:
    """float32 logits [rows, tokens, vocab] of `tokens` [rows, tokens], at most 32 a row.

    Each chunk ends where `ends` says, the last at the end of the tokens.
    """
    rows, begin, out = len(tokens), 0, []
    cache = new_cache(model, rows=rows, max_tokens=32)
    blocks, states = (np.arange(n * rows, dtype=np.int32).reshape(rows, n) + 1 for n in (2, 1))
    tables = tuple(states if w == STATE else blocks for w in model.config.groups.windows)
    first = (np.zeros(rows, np.int32),) * len(tables)
    for end in ends:
        count = end - begin
        starts = np.arange(rows, dtype=np.int32) * count
        lens, at = (np.full(rows, n, np.int32) for n in (count, begin))
        flat = tokens[:, begin:end].reshape(-1)
        where = jax.tree.map(jnp.asarray, (flat, starts, lens, at, tables, first))
        found, cache = _forward(model, cache, where, longest=count)
        out.append(np.asarray(found).reshape(rows, count, -1))
        begin = end
    return np.concatenate(out, axis=1)


def assert_same_bits(model: Model) -> None:
    """A prompt whole, in chunks, token by token, and beside another row: the same logits."""
    tokens = np.random.default_rng(0).integers(0, 60, (2, 20)).astype(np.int32)
    whole = chunked_logits(model, tokens[:1], [20])
    assert np.isfinite(whole).all()
    for ends in ([7, 20], [1, 2, 3, 4, 5, 6, 13, 20]):  # few lengths: each is a program
        np.testing.assert_array_equal(chunked_logits(model, tokens[:1], ends), whole)
    np.testing.assert_array_equal(chunked_logits(model, tokens[::-1], [7, 20])[1:], whole)
