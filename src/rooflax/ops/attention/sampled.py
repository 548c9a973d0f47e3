"""Attention with gradients whose forward pass is the engine's kernel: for steps of GRPO on a CPU.

A row is one sequence, and its keys are one block of a pool. The sums of a query do not depend on
blocks, so that the log-probabilities of a step are those that the engine sampled with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import native
from rooflax.ops.attention import cpu, trained
from rooflax.ops.attention.args import AttentionArgs, Dense, Paging
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import as_pool


@jax.custom_vjp
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    rows = q.shape[0]
    paging = Paging(
        block_tables=jnp.arange(rows, dtype=jnp.int32)[:, None],
        first_positions=dense.key_positions[:, 0],
        positions=dense.positions,
        context_lens=dense.context_lens,
    )
    return cpu.paged_attention(q, as_pool(k), as_pool(v), paging, args)


def _forward(*values: Any) -> tuple[Array, tuple[Any, ...]]:
    return attention(*values), values


def _backward(values: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    """Gradients of `trained.attention`, whose values differ by rounding."""
    _, pull = jax.vjp(trained.attention, *values)
    return pull(d_out)


attention.defvjp(_forward, _backward)


def unsupported(q: Array, k: Array, v: Array, dense: Dense, args: AttentionArgs) -> str | None:
    if not native.is_ready():
        return native.status().reason
    if dense.segment_ids is not None or not dense.causal_order:
        return "the engine's kernel takes one sequence a row"
    return trained.unsupported(q, k, v, dense, args)


BACKEND = Backend(attention, unsupported)
