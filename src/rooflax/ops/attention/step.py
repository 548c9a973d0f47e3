"""Attention between a layer's projections, as one operation: norms and RoPE of new queries and
keys, the write of new keys and values, and attention.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from rooflax.ops import accelerator, parts
from rooflax.ops.attention.args import AttentionArgs, Projected
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.dispatch import Operation
from rooflax.ops.kv_pool import PoolLeaf, as_pool

STEP = Operation("attention", {"pallas": "rooflax.ops.attention.gpu_step"})


@parts.attention
def attention_step(
    new: Projected,
    k_pool: PoolLeaf,
    v_pool: PoolLeaf,
    sequences: Sequences,
    args: AttentionArgs,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], PoolLeaf, PoolLeaf] | None:
    """Attention of new tokens, and the pools with their keys and values.

    What it computes is `rms_norm` of every query and key head, `apply_rope`, `cache_write` of each
    token at its position, and `ragged_attention`, one after the other. None where no kernel does
    all of that for the arguments: then they are called one after the other.

    Args:
        sequences: of one token each, in the list's order, or of none.
    """
    here = accelerator.platform() == "gpu" and accelerator.missing() is None
    if not here or implementation not in (None, "pallas"):
        return None
    operands = new, as_pool(k_pool), as_pool(v_pool), sequences, args
    if STEP.backend("pallas").unsupported(*operands) is not None:
        return None
    return STEP(implementation, *operands)
