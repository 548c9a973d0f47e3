"""Timeline of generated tokens, and the speeds that follow from it. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timeline:
    """One run of a batch.

    Attributes:
        start_s: when the request was made.
        arrivals_s: per row, when each of its tokens was on the host.
        tokens: per row, the ids.
    """

    start_s: float
    arrivals_s: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]]

    @property
    def first_s(self) -> float:
        """Time of the last row's first token: from here on all rows decode."""
        return max(row[0] for row in self.arrivals_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token, of the row that waited longest."""
        return self.first_s - self.start_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return max(row[-1] for row in self.arrivals_s) - self.first_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: (end - first token) / (tokens - 1)."""
        return self.decode_s / (len(self.tokens[0]) - 1)

    @property
    def decode_tok_per_s(self) -> float:
        """batch x (output tokens - 1) / (last token - first token)."""
        return len(self.tokens) / self.tpot_s

    def prefill_tok_per_s(self, prompt_tokens: int) -> float:
        """Prompt tokens of all rows over the time to first token."""
        return len(self.tokens) * prompt_tokens / self.ttft_s
