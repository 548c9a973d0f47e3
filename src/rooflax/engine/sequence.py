"""`Sequence`: one request's tokens as they pass through the engine. Pure Python, no jax."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from rooflax.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

NOT_FINITE = (
    "The model's output became NaN or infinite, so the request was ended; look for NaN weights "
    "with `check`."
)

NO_CONTINUATION, ENDS_EARLY = "The grammar has no valid continuation", "The grammar is complete"
NOT_ALLOWED = (
    "No token was left to choose, so the request was ended; loosen what it bans or allows, or its "
    "grammar."
)
FAULTS_OF_REQUESTS = (NO_CONTINUATION, ENDS_EARLY, NOT_ALLOWED)
"""Beginnings of errors that a request is to blame for, and not the engine."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities of one generated token: its own, and the best ids with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """Says which tokens may come next, so that a text follows the grammar that was asked for.

    Belongs to one sequence and follows it token by token, whatever happens to its blocks.
    """

    @property
    def mask(self) -> np.ndarray:
        """int32 words; token i may come next if bit i % 32 of word i // 32 is set."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        ...

    @property
    def error(self) -> str | None:
        """Reason why it cannot continue."""
        ...

    def accept(self, token: int) -> None:
        """Goes on by one token of the mask that does not end the sequence."""
        ...

    def look_ahead(self, token: int) -> np.ndarray:
        """The mask after a token that is to be accepted later, behind those looked at before.

        A fault becomes the error of that place.
        """
        ...

    def go_back(self) -> None:
        """Forgets what was looked at and not accepted."""
        ...


class StepOutput(NamedTuple):
    """Output of a step for one sequence; a value, so that another thread may read it.

    Attributes:
        times_s: of each token.
        logprobs: of each token, if asked for.
        finish_reason: None while the sequence runs.
        error: what went wrong, if that is "error".
    """

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    times_s: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None

    def then(self, later: StepOutput) -> StepOutput:
        """Both as one, of the same sequence."""
        return StepOutput(
            self.sequence,
            self.tokens + later.tokens,
            self.times_s + later.times_s,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.error,
        )


@dataclass(slots=True)
class KVState:
    """Block tables and cached length of a sequence, owned by the block manager.

    Attributes:
        cache_salt: only sequences of the same salt share blocks.
        num_cached_tokens: of the prompt, in the prefix cache at the first admission.
        block_tables: per layer group, the blocks in order.
        first_positions: per layer group, the position of the first token of its table.
        snapshots: of the next step, the positions whose state is kept for others, and the rows.
        version: changes whenever one of these three does.
        block_hashes: of the full blocks, as far as anyone has asked; see BlockManager.hashes.
        num_writable_tokens: positions below it may be written: the blocks hold them, and the next
            one is not shared.
        num_published_blocks: how many blocks other sequences may share.
        adapter: the slot of the LoRA adapter that keys and values come from, from 1 on; 0 is none.
    """

    cache_salt: str = ""
    num_cached_tokens: int | None = None
    block_tables: list[list[int]] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    version: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_writable_tokens: int = 0
    num_published_blocks: int = 0
    adapter: int = 0


@dataclass(slots=True)
class ScheduleState:
    """Progress of a sequence, owned by the scheduler.

    Attributes:
        slot: the row of per-sequence device state; None while waiting.
        num_preemptions: how often the sequence lost its blocks and started over.
        siblings: sequences that wait, run and end together, itself included.
        awaits_fork: has nothing to compute until it is forked from a sibling.
        is_suspect: was in a step that failed, and runs apart until it has a token; if that fails
            too, it ends.
    """

    slot: int | None = None
    num_preemptions: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    awaits_fork: bool = False
    is_suspect: bool = False


@dataclass(slots=True)
class Times:
    """Times on the monotonic clock: arrival, first admission, and each generated token."""

    arrival_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SamplerState:
    """Sampler inputs of a sequence beside its params, and the log-probabilities of its tokens.

    Attributes:
        constraint: what the text must look like; None is anything.
        num_candidates: after each token, how many of the best next ones the host chooses from;
            None where the device chooses.
        candidates: those, best first, until the host has chosen.
        num_uncounted: how many of the last tokens were forced, not sampled, and the penalties on
            the device do not know yet.
        num_discarded: how many tokens of the last decode steps were not taken, and are counted by
            penalties on the device until the next step.
        logprobs: per generated token, if asked for.
        prompt_logprobs: per token of the prompt but the first, if asked for.
    """

    constraint: Constraint | None = None
    num_candidates: int | None = None
    candidates: tuple[tuple[int, float], ...] = ()
    num_uncounted: int = 0
    num_discarded: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def needs_host(self) -> bool:
        """Whether the host must see every token before the next one."""
        return self.constraint is not None or self.num_candidates is not None


class FeatureState:
    """State of a feature for one sequence; base class of the types of slots.

    Attributes:
        feature: its name in errors.
    """

    feature: ClassVar[str]

    @classmethod
    def of(cls, sequence: Sequence) -> Self | None:
        """The sequence's; None if the feature keeps nothing of it."""
        return sequence.features.get(cls)

    def completion_fields(self) -> dict[str, Any]:
        """Fields of the `Completion` that come from here."""
        return {}


@dataclass(eq=False)
class Sequence:
    """Tokens of one sample of one request.

    Attributes:
        request_id: the caller's; samples of one request differ in `sample_index`.
        tokens: the prompt, then what was generated.
        error: what went wrong, if finish_reason is "error".
        num_computed_tokens: how many of them have their K and V in the cache.
        features: what each feature keeps of it, by the state's type.
    """

    request_id: int
    prompt_tokens: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    sample_index: int = 0
    finish_reason: str | None = None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    kv: KVState = field(default_factory=KVState)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    sampler: SamplerState = field(default_factory=SamplerState)
    times: Times = field(default_factory=Times)
    features: dict[type[FeatureState], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)
        self.schedule.siblings = self.schedule.siblings or [self]

    def pause(self, seconds: float) -> None:
        """Leaves out of its times what passed between two steps: all before moves up to now."""
        times = self.times
        times.arrival_s += seconds
        if times.admitted_s is not None:
            times.admitted_s += seconds
        times.tokens_s = [time_s + seconds for time_s in times.tokens_s]

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
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps must run.

        A decoding sequence has exactly one, and one that waits for its siblings none.
        """
        return 0 if self.schedule.awaits_fork else len(self.tokens) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - (len(self.tokens) - len(self.prompt_tokens))

    @property
    def longest(self) -> int:
        """Tokens that the sequence can come to hold."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether more than the last token must run; what is left then is a decode step."""
        return self.num_uncomputed_tokens > 1

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.sampler.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def may_share(self) -> bool:
        """Whether its first tokens may be taken from the prefix cache: not if all are scored."""
        return self.params.prompt_logprobs is None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def output_since(self, num_output_tokens: int) -> StepOutput:
        """Output tokens after the first `num_output_tokens`."""
        return StepOutput(
            self,
            tuple(self.tokens[len(self.prompt_tokens) + num_output_tokens :]),
            tuple(self.times.tokens_s[num_output_tokens:]),
            tuple(self.sampler.logprobs[num_output_tokens:]) if self.sampler.logprobs else (),
            self.finish_reason,
            self.error,
        )

    def append(self, token: int, now_s: float) -> None:
        """Takes a generated token, and finishes the sequence if it is the last."""
        self.tokens.append(token)
        self.times.tokens_s.append(now_s)
        if token in self.stop_ids:
            self.finish("stop")
            return
        if self.num_output_tokens >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error


class RowError(Exception):
    """Error of one sequence, raised before its step ran."""

    def __init__(self, sequence: Sequence, error: BaseException):
        super().__init__(str(error))
        self.sequence, self.error = sequence, error


@contextmanager
def fault_of(sequence: Sequence) -> Iterator[None]:
    """
    Raises:
        RowError: in place of whatever is raised within.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a library's panic is no Exception
        raise RowError(sequence, error) from error


def with_siblings(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The sequences, each once, and with each its siblings."""
    return list({id(other): other for s in sequences for other in s.schedule.siblings}.values())
