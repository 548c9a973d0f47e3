"""What operators watch, as plain values. Pure Python, no jax."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

from rooflax.engine.sequence import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Histogram:
    """How many values fell at or below each bound, and above the one before it.

    Attributes:
        counts: one per bound, and one for what is above all of them.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Metrics:
    """Counters since the engine began, and gauges of this moment.

    Attributes:
        num_waiting, num_running: sequences.
        blocks_used, blocks_total: per layer group.
        num_prompt_tokens, num_cached_tokens: admitted, and how many of them were in the cache.
        num_generated_tokens, num_steps, num_preemptions: since the beginning.
        num_draft_tokens, num_accepted_tokens: of speculative decoding.
        num_finished: sequences by finish_reason.
        num_compilations: after warm-up.
        ttft_s, itl_s, e2e_s: time to first token, between tokens, and to the end.
    """

    num_waiting: int = 0
    num_running: int = 0
    blocks_used: list[int] = field(default_factory=list)
    blocks_total: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    num_compilations: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    itl_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)

    def token(self, sequence: Sequence, now_s: float) -> None:
        """A token of the sequence is about to be appended."""
        self.num_generated_tokens += 1
        if sequence.token_times_s:
            self.itl_s.observe(now_s - sequence.token_times_s[-1])
        else:
            self.ttft_s.observe(now_s - sequence.arrival_s)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_cached_tokens or 0

    def finished(self, sequence: Sequence, now_s: float) -> None:
        reason = sequence.finish_reason or "abort"
        # Another dict, not the same one changed: another thread may be reading it.
        self.num_finished = {
            **self.num_finished, reason: self.num_finished.get(reason, 0) + 1
        }  # fmt: skip
        self.e2e_s.observe(now_s - sequence.arrival_s)

    def as_dict(self) -> dict[str, Any]:
        """A copy made of numbers, lists and dicts."""
        return asdict(self)
