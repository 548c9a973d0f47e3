"""`Feature`: a part of the engine that can be left out. Pure Python, no jax.

Features run through the same hooks, in the order of `Engine.features`: of a request before it is
queued, before scheduling, before a step, after each device call and token, and after a step. What
a feature keeps of one sequence is a `FeatureState`, in the sequence's slot of that type.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from rooflax.engine.sequence import FeatureState, Sequence, StepOutput

if TYPE_CHECKING:
    from rooflax.engine.metrics import Metrics
    from rooflax.engine.packing import StepResult
    from rooflax.engine.runner import Compiled, Runner, StepCall
    from rooflax.engine.scheduler import Scheduler, StepPlan
    from rooflax.nn.engine_config import EngineConfig


class CallTimes(NamedTuple):
    """Times of a device call, on the monotonic clock.

    Attributes:
        scheduled_s: when its step was begun, or the call before it ended.
        prepared_s: the same without scheduling and compilation; drafting is included.
        begun_s, ended_s: of the call itself.
    """

    scheduled_s: float
    prepared_s: float
    begun_s: float
    ended_s: float


class Core(Protocol):
    """Interface of the engine that features may use."""

    config: EngineConfig
    runner: Runner
    scheduler: Scheduler
    metrics: Metrics
    has_own_clock: bool
    """Whether no other process chooses too; several must all choose alike, and clocks differ."""

    def isolates(self, error: BaseException) -> bool:
        """Whether a fault costs its requests, or here its feature, and not the engine."""
        ...

    def restart(self, sequence: Sequence) -> None:
        """Requeues a running sequence; nothing that it has written to the cache stays."""
        ...

    def fail(self, sequence: Sequence, why: str, now_s: float) -> list[StepOutput]:
        """Ends a sequence and its siblings with an error."""
        ...


class Feature:
    """Hooks that do nothing; a feature overrides those that it needs.

    Attributes:
        state: what it keeps of a sequence; None is nothing.
        num_lookahead_tokens: the most tokens that it adds behind a decode row.
        core: its engine, which sets it.
        num_bytes: of device memory that it takes.
    """

    state: ClassVar[type[FeatureState] | None] = None
    num_lookahead_tokens: int = 0
    num_bytes: int = 0
    core: Core

    @classmethod
    def prepare(cls, sequences: list[Sequence]) -> None:
        """Gives the sequences of a request their slots."""

    @classmethod
    def check(cls, sequence: Sequence, vocab_size: int, num_slots: int) -> None:
        """
        Args:
            num_slots: sequences that run at once.

        Raises:
            RequestError: the sequence could not run.
        """

    @classmethod
    def is_for(cls, config: EngineConfig) -> bool:
        """Whether an engine of these settings has the feature."""
        del config
        return True

    @classmethod
    def step_function(cls, config: EngineConfig) -> dict[str, Any]:
        """Arguments of `StepFunctions` that replace `run_step`; empty is none."""
        return {}

    def limit_steps(self, decodes: list[Sequence], most: int) -> int:
        """Limits the decode steps of a dispatch; runs before scheduling."""
        return most

    def before_step(self, plan: StepPlan) -> StepPlan:
        """The plan, with what the feature adds to it."""
        return plan

    def after_call(self, call: StepCall, result: StepResult, times: CallTimes) -> None:
        """Handles a device call before its tokens are appended; a sequence that it restarts or
        finishes gets none of them."""

    def after_token(self, sequence: Sequence, result: StepResult | None) -> bool:
        """A sequence with slots got a token.

        Args:
            result: of the call; None where the token was forced.

        Returns:
            Whether the tokens that the same call computed after it count.
        """
        return True

    def forced_token(self, sequence: Sequence) -> int | None:
        """The only token that can follow, to run with the sequence's next step."""
        return None

    def after_step(self, plan: StepPlan) -> list[StepOutput]:
        """Returns outputs of sequences beyond the tokens of the step."""
        return []

    def warm_up(self, report: Callable[[Compiled], None]) -> Seq[Compiled]:
        """Compiles what the feature needs, once; lines of the warm-up report."""
        return []

    def reset(self) -> None:
        """Forgets what was computed, after a failure of the device."""
