"""The attention operation: checks and dispatch.

Who sees whom is decided by positions alone; no mask is ever an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import accelerator, parts
from rooflax.ops.accelerator import per_platform
from rooflax.ops.attention import cpu, reference, xla
from rooflax.ops.attention.args import AttentionArgs, Dense, Paging
from rooflax.ops.dispatch import choose
from rooflax.ops.quantization import QuantizedPool

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention}
PAGED_IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "native": cpu.paged_attention,
    "pallas": per_platform("attention", "paged_attention"),
}


@parts.attention
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    dense: Dense,
    args: AttentionArgs,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention.

        p = softmax over s of (scale * q[t] . k[s], and the sink as one more logit)
        out[t] = sum over s of p[t, s] * v[s]

    Query t sees key s if s's position is not above t's, is below `context_lens`, is less than
    `window` behind t's, is in the pattern, and both are in the same segment. A query that sees no
    key gives zeros. Scores, softmax and sums are float32; returns q's dtype.

    Args:
        q: query head n belongs to K/V head n // (N // K).
        implementation: "reference", "xla", or None for the platform's best.

    Raises:
        ValueError: N is not a multiple of K.
        NotImplementedError: the named implementation does not exist here.

    Source: Ainslie et al., GQA, 2023; sinks as in openai/gpt-oss, gpt_oss/torch/model.py (sdpa).
    """
    check_heads(q.shape[2], k.shape[1])
    return choose("attention", IMPLEMENTATIONS, implementation)(q, k, v, dense, args)


@parts.attention
def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size width"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size width"] | QuantizedPool,
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
    compute = chosen(args, implementation)
    head_dim, padding = q.shape[3], k_pool.shape[3] - q.shape[3]
    if padding:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding)))
    out = compute(q, k_pool, v_pool, paging, args)
    return out[..., :head_dim] if padding else out


def chosen(args: AttentionArgs, implementation: str | None) -> Callable[..., Any]:
    """The paged implementation; None is XLA's where no kernel of the platform takes `args`."""
    kernels_cannot = args.repeat_kv or (args.pattern and accelerator.platform() == "cpu")
    if implementation is None and kernels_cannot:
        implementation = "xla"
    return choose("paged_attention", PAGED_IMPLEMENTATIONS, implementation)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} K/V heads")
