"""Arithmetic of blocks, shared by the cache's arrays and by those who hand blocks out."""

from __future__ import annotations

MOST_DECODE_STEPS = 32
"""The most decode steps in a dispatch, if the caller does not say how many."""
SCORED_AT_ONCE = 256
"""Tokens whose logits exist at the same time while scoring."""
STATE = 0
"""Stands for the window of layers that keep no K and V but a state of fixed size per sequence.
Their group's blocks are rows, each one sequence's state in all of these layers."""
STATE_GRID = 64
"""Tokens; states at multiples of it are kept for the prefix cache."""
SNAPSHOT_BYTES = 512 << 20
"""The most that states kept for the prefix cache take, beside those of running sequences."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def most_new_tokens(prefill_chunk: int, decode_steps: int, draft_tokens: int = 0) -> int:
    """The most tokens that a step writes for one sequence."""
    return max(prefill_chunk, decode_steps, 1 + draft_tokens)


def state_grid(block_size: int) -> int:
    """Distance in tokens between kept states: blocks end at its multiples."""
    return max(STATE_GRID, block_size)


def num_snapshots(row_bytes: int, num_slots: int, max_tokens: int, block_size: int) -> int:
    """Number of states kept for the prefix cache: one for each grid cell in every slot's context,
    but not more than SNAPSHOT_BYTES hold.

    Args:
        row_bytes: of one sequence's state in all layers; 0 if there are none with state.
    """
    if row_bytes == 0:
        return 0
    return min(num_slots * (max_tokens // state_grid(block_size)), SNAPSHOT_BYTES // row_bytes)


def blocks_needed(
    window: int | None, max_tokens: int, new_tokens: int, block_size: int, state_rows: int = 1
) -> int:
    """The most blocks of one layer group that a sequence holds at once.

    Args:
        window: the group's window, None for full attention, STATE for rows of state.
        max_tokens: the longest context of the sequence.
        new_tokens: the most tokens written before older blocks are let go of.
        state_rows: of a sequence; and one for each lookahead token.
    """
    if window == STATE:
        return state_rows
    full = ceil_div(max_tokens, block_size)
    if window is None:
        return full
    return min(full, ceil_div(window + new_tokens - 1, block_size) + 1)
