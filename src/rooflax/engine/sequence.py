"""`Sequence`: one request's tokens as they pass through the engine. Pure Python, no jax."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from rooflax.engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is; the engine moves it from the first to the last."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities of one generated token: its own, and the best ids with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """Tokens of one sample of one request.

    Attributes:
        request_id: the caller's; samples of one request differ in `sample_index`.
        tokens: the prompt, then what was generated.
        num_computed_tokens: how many of them have their K and V in the cache.
        block_tables: per layer group, the blocks in order.
        first_positions: per layer group, the position of the first slot of its table.
        slot: the row of per-sequence device state; None while waiting.
        times: of arrival and of each generated token, seconds on the monotonic clock.
    """

    request_id: int
    prompt_tokens: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    sample_index: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    slot: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    arrival_s: float = field(default_factory=time.perf_counter)
    token_times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps must run; a decoding sequence has exactly one."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.num_output_tokens

    @property
    def longest(self) -> int:
        """Tokens that the sequence can come to hold."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token: int, now_s: float) -> None:
        """Takes a generated token, and finishes the sequence if it is the last."""
        self.tokens.append(token)
        self.token_times_s.append(now_s)
        if token in self.stop_ids:
            self.finish("stop")
        elif self.num_remaining_tokens <= 0:
            self.finish("length")

    def truncate(self, num_output_tokens: int) -> None:
        """Drops generated tokens beyond the first `num_output_tokens`: a stop string cut them."""
        del self.tokens[self.num_prompt_tokens + num_output_tokens :]
        del self.token_times_s[num_output_tokens:]
        del self.logprobs[num_output_tokens:]

    def finish(self, reason: str) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
