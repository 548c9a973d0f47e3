"""The attention operation: checks and dispatch.

Who sees whom is decided by positions alone; no mask is ever an argument.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from rooflax.ops import parts
from rooflax.ops.accelerator import per_platform
from rooflax.ops.attention import cpu, gpu, reference, xla
from rooflax.ops.dispatch import choose
from rooflax.ops.quantization import QuantizedPool

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention}
PAGED_IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "native": cpu.paged_attention,
    "pallas": per_platform("paged_attention", gpu=gpu.paged_attention),
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
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention.

        p = softmax over s of (scale * q[t] . k[s], and the sink as one more logit)
        out[t] = sum over s of p[t, s] * v[s]

    Query t sees key s if s's position is not above t's, is below `context_lens`, is less than
    `window` behind t's, and both are in the same segment. A query that sees no key gives zeros.
    Scores, softmax and sums are float32; returns q's dtype.

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
        implementation: "reference", "xla", or None for the platform's best.

    Raises:
        ValueError: N is not a multiple of K.
        NotImplementedError: the named implementation does not exist here.

    Source: Ainslie et al., GQA, 2023; sinks as in openai/gpt-oss, gpt_oss/torch/model.py (sdpa).
    """
    _check_heads(q.shape[2], k.shape[1])
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
    )


@parts.attention
def paged_attention(
    q: Float[Array, "B T N H"],
    k_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    v_pool: Float[Array, "blocks K block_size H"] | QuantizedPool,
    *,
    block_tables: Int[Array, "B nb"],
    first_positions: Int[Array, " B"],
    positions: Int[Array, "B T"],
    context_lens: Int[Array, " B"],
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    repeat_kv: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` over keys and values that lie in blocks of a pool.

    Row b's keys are the blocks `block_tables[b]` one after the other, the first of them at
    position `first_positions[b]`. The new tokens' K and V have been written already.
    Everything else is as in `attention`.
    """
    _check_heads(q.shape[2], k_pool.shape[1])
    if implementation is None and repeat_kv:  # the kernel has nothing to copy
        implementation = "xla"
    compute = choose("paged_attention", PAGED_IMPLEMENTATIONS, implementation)
    return compute(
        q,
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
    )


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} K/V heads")
