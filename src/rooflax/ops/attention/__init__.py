"""Attention, over contiguous keys and values and over the paged KV cache."""

from rooflax.ops.attention.api import attention, paged_attention

__all__ = ["attention", "paged_attention"]
