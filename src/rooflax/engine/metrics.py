"""Metrics for operators, as plain values. Pure Python, no jax."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rooflax.engine.sequence import Sequence

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
           2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
             120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Bounds, those of vLLM with finer ones below."""
KEPT = 0.98
"""Share that `decode_roofline` keeps of its memory at every dispatch."""


@dataclass
class Histogram:
    """Histogram: the number of values up to each bound and above the one before it.

    Attributes:
        counts: one per bound, and one for what is above all of them.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @staticmethod
    def of(bounds: tuple[float, ...]) -> Histogram:
        """An empty one."""
        return Histogram(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Metrics:
    """Counters since the engine began, and gauges of this moment.

    Attributes:
        num_waiting, num_running: sequences.
        adapters_waiting, adapters_running: slots of the LoRA adapters that those ask for.
        blocks_used, blocks_total: per layer group.
        block_size: tokens of a block.
        num_prompt_tokens, num_cached_tokens: admitted, and how many of them were in the cache.
        num_generated_tokens, num_steps, num_preemptions: since the beginning.
        num_draft_tokens, num_accepted_tokens: of speculative decoding.
        num_finished: sequences by finish_reason.
        num_compilations: after warm-up.
        num_program_tokens, num_padding_tokens: that programs of steps were made for, and how many
            of those were padding.
        decode_seconds, ideal_decode_seconds: what decode steps took, from scheduling to their
            tokens, and what the machine allows, where that is known.
        decode_roofline: the latter as a share of the former, of about the last fifty dispatches;
            None where it is not known.
        ttft_s, itl_s: time to first token, and between tokens, of every sequence.
        e2e_s, queue_s, prefill_s, decode_s, inference_s: of a sequence that ended by itself, its
            whole time; until it was first admitted; from there to its first token; from there to
            its last; the last two together.
        tpot_s, prompt_tokens, output_tokens, max_tokens, samples: of such a sequence; its mean time
            between tokens, and n of its request.
        step_tokens, step_s: that a step ran, and how long one of a dispatch's steps took.
    """

    num_waiting: int = 0
    num_running: int = 0
    adapters_waiting: list[int] = field(default_factory=list)
    adapters_running: list[int] = field(default_factory=list)
    blocks_used: list[int] = field(default_factory=list)
    blocks_total: list[int] = field(default_factory=list)
    block_size: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    num_compilations: int = 0
    num_program_tokens: int = 0
    num_padding_tokens: int = 0
    decode_seconds: float = 0.0
    ideal_decode_seconds: float = 0.0
    decode_roofline: float | None = None
    ttft_s: Histogram = field(default_factory=partial(Histogram.of, FIRST_S))
    itl_s: Histogram = field(default_factory=partial(Histogram.of, TOKEN_S))
    e2e_s: Histogram = field(default_factory=partial(Histogram.of, REQUEST_S))
    queue_s: Histogram = field(default_factory=partial(Histogram.of, REQUEST_S))
    prefill_s: Histogram = field(default_factory=partial(Histogram.of, REQUEST_S))
    decode_s: Histogram = field(default_factory=partial(Histogram.of, REQUEST_S))
    inference_s: Histogram = field(default_factory=partial(Histogram.of, REQUEST_S))
    tpot_s: Histogram = field(default_factory=partial(Histogram.of, TOKEN_S))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram.of, TOKENS))
    output_tokens: Histogram = field(default_factory=partial(Histogram.of, TOKENS))
    max_tokens: Histogram = field(default_factory=partial(Histogram.of, TOKENS))
    samples: Histogram = field(default_factory=partial(Histogram.of, SAMPLES))
    step_tokens: Histogram = field(default_factory=partial(Histogram.of, TOKENS))
    step_s: Histogram = field(default_factory=partial(Histogram.of, TOKEN_S))

    def __post_init__(self) -> None:
        self._recent = [0.0, 0.0]

    def token(self, sequence: Sequence, now_s: float) -> None:
        """A token of the sequence is about to be appended."""
        self.num_generated_tokens += 1
        if sequence.times.tokens_s:
            self.itl_s.observe(now_s - sequence.times.tokens_s[-1])
        else:
            self.ttft_s.observe(now_s - sequence.times.arrival_s)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.kv.num_cached_tokens or 0

    def called(self, num_tokens: int, num_program_tokens: int, step_s: float) -> None:
        """A program of so many tokens ran, some of which are padding."""
        self.step_s.observe(step_s)
        self.num_program_tokens += num_program_tokens
        self.num_padding_tokens += num_program_tokens - num_tokens

    def decoded(self, seconds: float, ideal_s: float) -> None:
        """A dispatch of decode steps ended."""
        self.decode_seconds += seconds
        self.ideal_decode_seconds += ideal_s
        self._recent = [
            KEPT * old + new for old, new in zip(self._recent, (seconds, ideal_s), strict=True)
        ]
        self.decode_roofline = self._recent[1] / self._recent[0]

    def step(self, num_tokens: int) -> None:
        """A step ran."""
        self.num_steps += 1
        self.step_tokens.observe(num_tokens)

    def finished(self, sequence: Sequence, now_s: float) -> None:
        reason = sequence.finish_reason or "abort"
        # Another dict, not the same one changed: another thread may be reading it.
        self.num_finished = {
            **self.num_finished, reason: self.num_finished.get(reason, 0) + 1
        }  # fmt: skip
        times, admitted_s = sequence.times.tokens_s, sequence.times.admitted_s
        if reason not in ("stop", "length") or not times or admitted_s is None:
            return
        count = sequence.num_output_tokens
        self.e2e_s.observe(now_s - sequence.times.arrival_s)
        self.queue_s.observe(admitted_s - sequence.times.arrival_s)
        self.prefill_s.observe(times[0] - admitted_s)
        self.decode_s.observe(times[-1] - times[0])
        self.inference_s.observe(times[-1] - admitted_s)
        if count > 1:
            self.tpot_s.observe((times[-1] - times[0]) / (count - 1))
        self.prompt_tokens.observe(sequence.num_prompt_tokens)
        self.output_tokens.observe(count)
        self.max_tokens.observe(sequence.max_tokens)
        if sequence.sample_index == 0:
            self.samples.observe(sequence.params.n)

    def finished_all(self, sequences: list[Sequence], now_s: float) -> None:
        """As `finished`, of those that have."""
        for sequence in sequences:
            if sequence.is_finished:
                self.finished(sequence, now_s)

    def as_dict(self) -> dict[str, Any]:
        """A copy made of numbers, lists and dicts."""
        return asdict(self)
