"""Attention over the blocks of a pool on a GPU: the blocks are read in place, by their table.

Queries in bfloat16 over pools of bfloat16 or int8 go to the tensor cores (gpu_flash.py), a few with
heads of more than 256, over latents or over float32 too (gpu_wide.py), and what else is a few to
CUDA cores (gpu_split.py). All visit the tiles of keys that plan.py lists for them, and give sums
that are merged here, with the sinks.

Interpret mode shows that the kernels mean what the reference says; lowering and assembling for
sm_90a show that they compile; docs/gpu.md has what a card showed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.attention import gpu_flash, gpu_wide
from rooflax.ops.attention.args import AttentionArgs, Paging
from rooflax.ops.attention.gpu_flash import TILE, flash
from rooflax.ops.attention.gpu_split import MOST_QUERIES, split
from rooflax.ops.attention.paging import unsupported_by
from rooflax.ops.dispatch import Backend
from rooflax.ops.kv_pool import Pool

WIDEST = 512
"""Elements of a head that CUDA cores take."""


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Pool,
    v_pool: Pool,
    paging: Paging,
    args: AttentionArgs,
) -> Float[Array, "B T N H"]:
    kv_heads, head_dim = k_pool.values.shape[1], q.shape[3]
    rows, length, heads, _ = q.shape
    group = heads // kv_heads
    queries = q.reshape(rows, length, kv_heads, group, head_dim).swapaxes(1, 2)
    queries = queries.reshape(rows, kv_heads, length * group, head_dim)
    partials = _kernel(q, k_pool, args)(queries, k_pool, v_pool, paging, args)
    by_query = None
    if args.sinks is not None:
        of_head = args.sinks.astype(jnp.float32).reshape(kv_heads, group)
        by_query = jnp.tile(of_head, (1, length))
    out = _merged(*partials, by_query).reshape(rows, kv_heads, length, group, head_dim)
    return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)


def unsupported(
    q: Any, k_pool: Pool, v_pool: Pool, where: object, args: AttentionArgs
) -> str | None:
    del v_pool, where
    _, kv_heads, block_size, head_dim = k_pool.values.shape
    if why := unsupported_by("attention's GPU kernel", k_pool, args):
        return why
    if block_size % 8 or head_dim % 64:
        return (
            "attention's GPU kernel takes blocks by 8 and heads by 64, "
            f"not {block_size} and {head_dim}"
        )
    why, why_not_wide = _no_tensor_cores(q, k_pool), gpu_wide.unsupported(q, k_pool, args)
    if why is None or why_not_wide is None:
        return None
    if head_dim > WIDEST and k_pool.values.dtype == jnp.bfloat16:
        return why_not_wide
    if head_dim > WIDEST:
        return f"attention's GPU kernel takes heads of up to {WIDEST}, not {head_dim}"
    few = q.shape[1] * (q.shape[2] // kv_heads) <= MOST_QUERIES
    return None if few else f"{why}, for more than {MOST_QUERIES} queries of a K/V head"


def _kernel(q: Any, k_pool: Pool, args: AttentionArgs) -> Callable[..., tuple[Array, Array, Array]]:
    """Kernel of arguments that are supported."""
    if _no_tensor_cores(q, k_pool) is None:
        return flash
    return split if gpu_wide.unsupported(q, k_pool, args) else gpu_wide.wide


def _no_tensor_cores(q: Any, k_pool: Pool) -> str | None:
    """Reason why `gpu_flash` does not run; None if it does."""
    block_size, head_dim = k_pool.values.shape[2:]
    if q.dtype != jnp.bfloat16 or k_pool.values.dtype not in (jnp.bfloat16, jnp.int8):
        return "attention's tensor cores take bfloat16 over bfloat16 or int8 only"
    if TILE % block_size:
        return f"attention's tensor cores take no blocks of {block_size}"
    if head_dim > gpu_flash.WIDEST:
        return f"attention's tensor cores take heads of up to {gpu_flash.WIDEST}, not {head_dim}"
    return None


def _merged(
    highs: Float[Array, "B K splits queries"],
    sums: Float[Array, "B K splits queries"],
    outs: Float[Array, "B K splits queries H"],
    sinks: Float[Array, "K queries"] | None,
) -> Float[Array, "B K queries H"]:
    """One softmax of all shares and the sink; zeros where nothing is seen."""
    highest = highs.max(axis=2)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None])
    shares = jnp.exp(highs - highest[:, :, None])
    total = (sums * shares).sum(axis=2)
    if sinks is not None:
        total = total + jnp.exp(sinks[None] - highest)
    out = (outs * shares[..., None]).sum(axis=2)
    return out / jnp.where(total == 0, 1.0, total)[..., None]


BACKEND = Backend(paged_attention, unsupported, reads_blocks=True)
