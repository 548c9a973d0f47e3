"""The attention operation: checks and dispatch.

Who sees whom is decided by positions alone; no mask is ever an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import dispatch, parts
from rooflax.ops.attention import reference, xla
from rooflax.ops.attention.args import AttentionArgs, Dense, Paging
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.kv_pool import PoolLeaf, as_pool

DENSE = Operation("dense attention", {"reference": reference.DENSE, "xla": xla.DENSE})
TRAINED = Operation(
    "attention with gradients",
    {
        "xla": xla.DENSE,
        "sampled": "rooflax.ops.attention.sampled",
        "native": "rooflax.ops.attention.trained",
    },
)
BACKENDS: Mapping[str, Backend | str] = {
    "reference": reference.BACKEND,
    "xla": xla.BACKEND,
    "native": "rooflax.ops.attention.cpu",
    "pallas": "rooflax.ops.attention.{platform}",
}
PAGED = Operation("attention", BACKENDS)


@parts.attention
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
    *,
    implementation: str | None = None,
    trains: bool = False,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention.

        p = softmax over s of (scale * q[t] . k[s], and the sink as one more logit)
        out[t] = sum over s of p[t, s] * v[s]

    Query t sees key s if s's position is not above t's (unless `causal` is False), is below
    `context_lens`, is less than `window` from t's, is in the pattern, and both are in the same
    segment. A query that sees no key gives zeros. Scores, softmax and sums are float32; returns
    q's dtype.

    Args:
        q: query head n belongs to K/V head n // (N // K).
        implementation: "reference", "xla", or None for the platform's best.
        trains: take the best that has gradients instead; with the implementation "trained" the
            one with the engine's sums, where that takes these arguments.

    Raises:
        ValueError: N is not a multiple of K.
        RequestError: the named implementation is not here.

    Source: Ainslie et al., GQA, 2023; sinks as in openai/gpt-oss, gpt_oss/torch/model.py (sdpa).
    """
    check_heads(q.shape[2], k.shape[1])
    if trains:
        missing = TRAINED.backend("sampled").unsupported(q, k, v, dense, args)
        as_sampled = implementation == dispatch.TRAINED and missing is None
        return TRAINED("sampled" if as_sampled else None, q, k, v, dense, args)
    return DENSE(implementation, q, k, v, dense, args)


@parts.attention
def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: PoolLeaf,
    v_pool: PoolLeaf,
    paging: Paging,
    args: AttentionArgs,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` over keys and values that lie in blocks of a pool.

    The new tokens' K and V have been written already. Pools may be wider than q's heads, by zeros.
    The TPU's and the GPU's kernels do not read blocks that a pattern hides. Everything else is as
    in `attention`.
    """
    check_heads(q.shape[2], k_pool.shape[1])
    head_dim = q.shape[3]
    q = with_pool_width(q, k_pool)
    out = PAGED(implementation, q, as_pool(k_pool), as_pool(v_pool), paging, args)
    return trimmed(out, head_dim)


def with_pool_width(q: Float[Array, "*batch H"], pool: Any) -> Float[Array, "*batch W"]:
    """Queries padded by zeros to the pool's heads."""
    padding = pool.shape[3] - q.shape[-1]
    return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, padding)]) if padding else q


def trimmed(out: Float[Array, "*batch W"], head_dim: int) -> Float[Array, "*batch H"]:
    """Without the padding."""
    return out[..., :head_dim] if out.shape[-1] > head_dim else out


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} K/V heads")
