"""Arithmetic of blocks, shared by the cache's arrays and by those who hand blocks out."""

from __future__ import annotations

DEFAULT_PREFILL_CHUNK = 512
"""The most tokens of one prompt in a step."""
MOST_DECODE_STEPS = 32
"""The most decode steps in a dispatch, if the caller does not say how many."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def most_new_tokens(prefill_chunk: int, decode_steps: int, draft_tokens: int = 0) -> int:
    """The most tokens that a step writes for one sequence."""
    return max(prefill_chunk, decode_steps, 1 + draft_tokens)


def blocks_needed(window: int | None, max_tokens: int, new_tokens: int, block_size: int) -> int:
    """The most blocks of one layer group that a sequence holds at once.

    Args:
        window: the group's window, None for full attention.
        max_tokens: the longest context of the sequence.
        new_tokens: the most tokens written before older blocks are let go of.
    """
    full = ceil_div(max_tokens, block_size)
    if window is None:
        return full
    return min(full, ceil_div(window + new_tokens - 1, block_size) + 1)
