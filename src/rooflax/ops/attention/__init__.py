"""Attention, over contiguous keys and values and over the paged KV cache."""

from rooflax.ops.attention.api import attention, paged_attention
from rooflax.ops.attention.args import AttentionArgs, Dense, Paging, Projected
from rooflax.ops.attention.ragged import ragged_attention
from rooflax.ops.attention.sequences import Sequences
from rooflax.ops.attention.step import attention_step

__all__ = [
    "AttentionArgs",
    "Dense",
    "Paging",
    "Projected",
    "Sequences",
    "attention",
    "attention_step",
    "paged_attention",
    "ragged_attention",
]
