"""How many KV blocks an engine gets: enough for every slot, or what a share of memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooflax.errors import RequestError
from rooflax.models.memory import gib
from rooflax.nn.kv_cache import bytes_per_token
from rooflax.nn.layout import blocks_needed
from rooflax.ops.accelerator import block_size

if TYPE_CHECKING:
    from rooflax.nn.decoder import Decoder

CACHE_SHARE = 0.5
"""Of the memory that is free once the weights are there, for the KV cache of a server."""


def plan_blocks(
    config: Decoder,
    *,
    kv_dtype: str,
    num_slots: int,
    max_tokens: int,
    new_tokens: int,
    block_size: int,
    limit_bytes: int | None,
) -> tuple[int, ...]:
    """Blocks per layer group, block 0 included.

    Window groups get what their windows need; a full group shares what is left.

    Args:
        new_tokens: the most tokens that a step writes for one sequence.
        limit_bytes: for the whole cache; None is no limit.

    Raises:
        RequestError: not even one sequence of `max_tokens` fits, with the arithmetic.
    """
    groups = config.groups
    per_block = block_size * bytes_per_token(config.num_kv_heads, config.head_dim, kv_dtype)
    cost = [per_block * groups.of_layer.count(g) for g in range(len(groups.windows))]
    longest = [blocks_needed(w, max_tokens, new_tokens, block_size) for w in groups.windows]
    slots = num_slots
    while slots > 1 and limit_bytes is not None and _bytes(cost, longest, slots) > limit_bytes:
        slots -= 1
    needed = _bytes(cost, longest, slots)
    if limit_bytes is not None and needed > limit_bytes:
        raise RequestError(
            f"The KV cache of one sequence of {max_tokens:,} tokens takes {gib(needed)} "
            f"({needed:,} bytes) and {gib(limit_bytes)} ({limit_bytes:,} bytes) is there for it; "
            f"lower max_model_len.",
            param="max_model_len",
        )
    return tuple(1 + slots * n for n in longest)


def plan_server(
    config: Decoder,
    *,
    kv_dtype: str,
    num_slots: int,
    max_tokens: int,
    new_tokens: int,
    free: int | None,
) -> tuple[int, ...]:
    """Blocks for all slots of a server, or for as many sequences as its share of memory holds.

    Args:
        new_tokens: as for `plan_blocks`.
        free: bytes once the weights are there; None is unknown, and no limit.

    Raises:
        RequestError: not even one sequence of `max_tokens` fits, with the arithmetic.
    """
    return plan_blocks(
        config,
        kv_dtype=kv_dtype,
        num_slots=num_slots,
        max_tokens=max_tokens,
        new_tokens=new_tokens,
        block_size=block_size(),
        limit_bytes=None if free is None else int(CACHE_SHARE * max(0, free)),
    )


def _bytes(cost: list[int], longest: list[int], slots: int) -> int:
    return sum(c * (1 + slots * n) for c, n in zip(cost, longest, strict=True))
