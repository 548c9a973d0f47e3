"""Cross-entropy of next tokens, a chunk of tokens at a time: no array is [tokens, vocabulary].

Both functions read a model's final norm and head alone, of any format, and have gradients with
respect to the hidden states and to what is trained of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.models.model import Model
from rooflax.nn.execution import ExecutionOptions

CHUNK_BYTES = 8 << 20
"""Bytes of a chunk's logits."""
FEWEST_TOKENS = 256
"""Tokens of a chunk; each adds to the head's gradient, as large as the head."""

Chunks = tuple[Any, ...]
"""Arrays [chunks, tokens, ...]."""


def cross_entropy_sum(
    model: Model,
    hidden: Float[Array, "rows seq D"],
    targets: Int[Array, "rows seq"],
    mask: Float[Array, "rows seq"],
    options: ExecutionOptions,
) -> Float[Array, ""]:
    """sum over tokens of mask * (logsumexp(logits) - logits[target]), in nats, float32.

    Where a gradient is asked for, it is made with the loss, so that logits are computed once.
    The mask, which is any weights of tokens, has none.
    """
    return _sum(options, _head(model), _chunks(model, hidden, targets, mask))


def token_losses(
    model: Model,
    hidden: Float[Array, "rows seq D"],
    targets: Int[Array, "rows seq"],
    options: ExecutionOptions,
) -> Float[Array, "rows seq"]:
    """logsumexp(logits) - logits[target] of each token in nats: its negative log-probability.

    For losses that are not sums over tokens; the backward pass computes the logits again.
    """
    losses = _each(options, _head(model), _chunks(model, hidden, targets))
    return losses.reshape(-1)[: targets.size].reshape(targets.shape)


def _head(model: Model) -> Model:
    """The model with nothing but what logits are made with."""
    used = ("embed" if model.config.tied_embeddings else "lm_head", "final_norm")
    weights = {key: w for key, w in model.weights.items() if key.startswith(used)}
    return replace(model, weights=weights, rope=())


def _chunks(model: Model, hidden: Array, *others: Array) -> Chunks:
    """Arrays [rows, seq, ...] in chunks of tokens, filled up with zeros."""
    total = hidden.shape[0] * hidden.shape[1]
    most = max(FEWEST_TOKENS, CHUNK_BYTES // (4 * model.config.vocab_size))
    count = -(-total // most)
    size = -(-total // count)

    def split(array: Array) -> Array:
        flat = array.reshape(total, *array.shape[2:])
        full = jnp.pad(flat, [(0, count * size - total)] + [(0, 0)] * (flat.ndim - 1))
        return full.reshape(count, size, *flat.shape[1:])

    return tuple(map(split, (hidden, *others)))


def _losses(logits: Float[Array, "tokens vocab"], targets: Array) -> tuple[Array, Array]:
    """The losses of tokens, and the logarithms of the sums of exponentials."""
    log_sums = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return log_sums - chosen, log_sums


def _plain(options: ExecutionOptions, head: Model, chunks: Chunks) -> Float[Array, "chunks tokens"]:
    def one(chunk: Chunks) -> Array:
        return _losses(head.logits(chunk[0], options=options), chunk[1])[0]

    return jax.lax.map(one, chunks[:2])


def _with_gradients(
    options: ExecutionOptions, trained: Any, others: Any, chunks: Chunks
) -> tuple[Float[Array, ""], tuple[Any, Array]]:
    """The sum of losses by their weights, and its gradients: the head's, and hidden states'."""

    def logits_of(trained: Any, hidden: Array) -> Array:
        return _joined(trained, others).logits(hidden, options=options)

    def one(carry: tuple[Array, Any], chunk: Chunks) -> tuple[tuple[Array, Any], Array]:
        hidden, targets, weights = chunk
        logits, pull = jax.vjp(logits_of, trained, hidden)
        losses, log_sums = _losses(logits, targets)
        chosen = jnp.arange(logits.shape[1])[None] == targets[:, None]
        shares = jnp.exp(logits - log_sums[:, None])
        d_trained, d_hidden = pull(weights[:, None] * (shares - chosen.astype(jnp.float32)))
        sums = jnp.sum(losses * weights), d_trained
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, sums), d_hidden

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    (total, d_trained), d_hidden = jax.lax.scan(one, (jnp.zeros(()), zeros), chunks)
    d_trained = jax.tree.map(lambda grad, w: grad.astype(w.dtype), d_trained, trained)
    return total, (d_trained, d_hidden)


def _split(head: Any) -> tuple[Any, Any]:
    """A head's arrays that have a gradient, and those that have none; None stands for the rest."""
    leaves, tree = jax.tree.flatten(head)
    trained = (leaf.value if leaf.perturbed else None for leaf in leaves)
    others = (None if leaf.perturbed else leaf.value for leaf in leaves)
    return tree.unflatten(trained), tree.unflatten(others)


def _joined(trained: Any, others: Any) -> Model:
    def either(one: Any, other: Any) -> Any:
        return other if one is None else one

    return jax.tree.map(either, trained, others, is_leaf=lambda leaf: leaf is None)


def _values(chunks: Any) -> Chunks:
    return tuple(primal.value for primal in chunks)


def _each_forward(options: ExecutionOptions, head: Any, chunks: Any) -> tuple[Array, Any]:
    kept = (*_split(head), _values(chunks))
    return _plain(options, _joined(*kept[:2]), kept[2]), kept


def _each_backward(options: ExecutionOptions, kept: Any, d_losses: Array) -> tuple[Any, Any]:
    trained, others, chunks = kept
    d_trained, d_hidden = _with_gradients(options, trained, others, (*chunks, d_losses))[1]
    return d_trained, (d_hidden, None)


def _total(options: ExecutionOptions, head: Model, chunks: Chunks) -> Float[Array, ""]:
    return jnp.sum(_plain(options, head, chunks) * chunks[2])


def _sum_forward(options: ExecutionOptions, head: Any, chunks: Any) -> tuple[Array, Any]:
    return _with_gradients(options, *_split(head), _values(chunks))


def _sum_backward(options: ExecutionOptions, kept: Any, d_loss: Array) -> tuple[Any, Any]:
    del options
    d_trained, d_hidden = jax.tree.map(lambda grad: grad * d_loss.astype(grad.dtype), kept)
    return d_trained, (d_hidden, None, None)


_each = jax.custom_vjp(_plain, nondiff_argnums=(0,))
_each.defvjp(_each_forward, _each_backward, symbolic_zeros=True)
_sum = jax.custom_vjp(_total, nondiff_argnums=(0,))
_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)
