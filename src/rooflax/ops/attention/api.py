"""The attention operation: checks and dispatch.

Who sees whom is decided by positions alone; no mask is ever an argument.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import accelerator, parts
from rooflax.ops.accelerator import per_platform
from rooflax.ops.attention import cpu, reference, xla
from rooflax.ops.attention.pattern import Pattern
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
    *,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    causal_order: bool = False,
    repeat_kv: bool = False,
    pattern: Pattern | None = None,
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
        positions, key_positions: absolute positions of queries and keys.
        context_lens: keys at this position and above are padding.
        window: how many tokens a query sees, its own included; None is all.
        sinks: one logit per query head that takes part in the softmax and has no value.
        segment_ids: needs S == T; a token sees only its own segment.
        causal_order: the caller's word that S == T and no query sees a key of a higher index, so
            that an implementation may leave those out.
        repeat_kv: copy each K/V head for its query heads first (the slow way).
        pattern: leaves more keys out, for long contexts; None leaves out none.
        implementation: "reference", "xla", or None for the platform's best.

    Raises:
        ValueError: N is not a multiple of K.
        NotImplementedError: the named implementation does not exist here.

    Source: Ainslie et al., GQA, 2023; sinks as in openai/gpt-oss, gpt_oss/torch/model.py (sdpa).
    """
    check_heads(q.shape[2], k.shape[1])
    compute = choose("attention", IMPLEMENTATIONS, implementation)
    return compute(
        q,
        k,
        v,
        positions=positions,
        key_positions=key_positions,
        context_lens=context_lens,
        scale=scale,
        window=window,
        sinks=sinks,
        segment_ids=segment_ids,
        causal_order=causal_order,
        repeat_kv=repeat_kv,
        **_given(pattern),
    )


@parts.attention
def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size width"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size width"] | QuantizedPool,
    *,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B T"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    repeat_kv: bool = False,
    pattern: Pattern | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` over keys and values that lie in blocks of a pool.

    Row b's keys are the blocks `block_tables[b]` one after the other, the first of them at
    position `first_positions[b]`. The new tokens' K and V have been written already. Pools may be
    wider than q's heads, by zeros. The TPU's and the GPU's kernels do not read blocks that a
    pattern hides. Everything else is as in `attention`.
    """
    check_heads(q.shape[2], k_pool.shape[1])
    kernels_cannot = repeat_kv or (pattern is not None and accelerator.platform() == "cpu")
    if implementation is None and kernels_cannot:
        implementation = "xla"
    compute = choose("paged_attention", PAGED_IMPLEMENTATIONS, implementation)
    head_dim, padding = q.shape[3], k_pool.shape[3] - q.shape[3]
    out = compute(
        jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding))) if padding else q,
        k_pool,
        v_pool,
        block_tables=block_tables,
        first_positions=first_positions,
        positions=positions,
        context_lens=context_lens,
        scale=scale,
        window=window,
        sinks=sinks,
        repeat_kv=repeat_kv,
        **_given(pattern),
    )
    return out[..., :head_dim] if padding else out


def _given(pattern: Pattern | None) -> dict[str, Pattern]:
    """The argument for implementations, of which not all know patterns."""
    return {} if pattern is None else {"pattern": pattern}


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} K/V heads")
