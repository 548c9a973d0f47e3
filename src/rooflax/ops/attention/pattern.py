"""`Pattern`: which of its past a query sees in a long context, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Pattern:
    """Further visible keys: beside causality, query t sees key s if one of these holds:

        t - s < window
        s < first
        (t // block - s // block) % stride == 0

    Window alone is a sliding window, with `first` that of StreamingLLM, with `stride` the strided
    pattern of the Sparse Transformer, in blocks.

    Attributes:
        window: tokens, the query's own included; at least 1.
        first: tokens at the beginning.
        stride: in blocks; None is none of them.
        block: tokens per block of `stride`; the TPU's kernel skips up to so many at once.

    Source: Child et al., Generating Long Sequences with Sparse Transformers, 2019; Xiao et al.,
    Efficient Streaming Language Models with Attention Sinks, 2023.
    """

    window: int
    first: int = 0
    stride: int | None = None
    block: int = 128

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("first", 0), ("block", 1), ("stride", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"a pattern's {name} is {value}; it must be at least {least}")

    def sees(self, query: Any, key: Any) -> Any:
        """Positions of any shapes that broadcast to bool; above the query's, a key counts as seen
        or not as it happens.
        """
        seen = (key > query - self.window) | (key < self.first)
        if self.stride is None:
            return seen
        apart = self._block_of(query) - self._block_of(key)
        return seen | (jax.lax.rem(apart, jax.numpy.full_like(apart, self.stride)) == 0)

    def meets(self, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
        """Whether a query of a range may see a key of a range; ranges are (first, last)."""
        seen = (keys[1] > queries[0] - self.window) | (keys[0] < self.first)
        if self.stride is None:
            return seen
        nearest = self._block_of(queries[0]) - self._block_of(keys[1])
        farthest = self._block_of(queries[1]) - self._block_of(keys[0])
        return seen | (farthest // self.stride * self.stride >= nearest)

    def _block_of(self, positions: Any) -> Any:
        return jax.lax.div(positions, jax.numpy.full_like(positions, self.block))
