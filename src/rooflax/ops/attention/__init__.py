"""Attention, over contiguous keys and values and over the paged KV cache."""

from rooflax.ops.attention.api import attention, paged_attention
from rooflax.ops.attention.args import AttentionArgs, Dense, Paging
from rooflax.ops.attention.ragged import ragged_attention
from rooflax.ops.attention.sequences import Sequences

__all__ = [
    "AttentionArgs",
    "Dense",
    "Paging",
    "Sequences",
    "attention",
    "paged_attention",
    "ragged_attention",
]
