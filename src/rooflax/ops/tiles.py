"""Sizes rounded up to the tiles that a platform's memory has: what is padded is decided here.

A TPU's tiles have 128 lanes, and 32 rows of bytes. `accelerator` says which platform this is; what
the padding takes is counted by `models.memory.padding`. This module imports no jax.
"""

from __future__ import annotations

LANES = 128
"""Elements of the last axis of a TPU's tile."""
ROWS = 32
"""Rows of a TPU's tile of bytes; of an array with others, XLA would have another axis there."""


def up_to(size: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-size // multiple) * multiple


def block_size(platform: str) -> int:
    """Tokens per block of the KV cache: on TPU as many as a tile has lanes, elsewhere 16."""
    return LANES if platform == "tpu" else 16


def cache_width(head_dim: int, platform: str) -> int:
    """Elements that a token's head takes in the KV cache: on TPU whole rows of lanes."""
    return up_to(head_dim, LANES) if platform == "tpu" else head_dim


def prefill_chunk(platform: str) -> int:
    """The most tokens of one prompt in a step: on GPU so many that reading the weights costs
    little beside multiplying them."""
    return 2048 if platform == "gpu" else 512


def padded_vocab(vocab_size: int, num_shards: int) -> int:
    """Rows of embedding and head together on the devices that share them: as many on each."""
    return up_to(vocab_size, num_shards)
