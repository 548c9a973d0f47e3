"""`StepBudget`: what the next step may run, by what earlier ones took. Pure Python, no jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooflax.engine.buckets import SMALLEST_STEP, StepKind
from rooflax.engine.scheduler import Scheduler
from rooflax.nn.engine_config import EngineConfig

if TYPE_CHECKING:
    from rooflax.engine.runner import StepCall

FIRST_BUDGET = 128
"""Tokens of a server's steps before any has been timed, and where several processes must agree."""
FEWEST_TIMED = 32
"""Tokens of a step from which its time says what a token of a prompt takes."""


class StepBudget:
    """Sets a scheduler's `token_budget` and `steps_per_dispatch`.

    Args:
        has_own_clock: False where several processes must all choose alike, and clocks differ.
    """

    def __init__(self, config: EngineConfig, *, has_own_clock: bool):
        self.config, self._has_own_clock = config, has_own_clock
        self._token_s: float | None = None  # of a prompt, in a step of many

    def start(self, scheduler: Scheduler) -> None:
        """Resets the budget for a scheduler that has run nothing yet."""
        scheduler.token_budget = self._token_budget()
        self._time_step(scheduler, self.config.burst_s)

    def after_call(
        self, scheduler: Scheduler, call: StepCall, num_steps: int, seconds: float
    ) -> None:
        """Learns from a device call of `num_steps` steps."""
        self._time_step(scheduler, seconds / num_steps)
        if call.shape.kind is StepKind.STEP:
            self.time_tokens(scheduler, sum(call.counts), seconds)

    def time_tokens(self, scheduler: Scheduler, num_tokens: int, seconds: float) -> None:
        """Learns from a step what a token of a prompt takes, and how many a step may have."""
        if self.config.step_s is None or num_tokens < FEWEST_TIMED:
            return
        each = seconds / num_tokens
        self._token_s = each if self._token_s is None else (self._token_s + each) / 2
        scheduler.token_budget = self._token_budget()

    def _token_budget(self) -> int:
        """Token budget of a step: the maximum, or as many as take at most `step_s`."""
        config = self.config
        if config.step_s is None:
            return config.max_tokens_per_step
        fitting = FIRST_BUDGET
        if self._token_s is not None and self._has_own_clock:
            fitting = int(config.step_s / self._token_s)
        least = max(config.max_num_seqs + SMALLEST_STEP, FEWEST_TIMED)  # so that steps are timed
        return min(max(fitting, least), config.max_tokens_per_step)

    def _time_step(self, scheduler: Scheduler, step_s: float) -> None:
        """Chooses the steps of the next dispatch, if the caller did not.

        Args:
            step_s: of the last decode step, or of a prefill, which takes no less.
        """
        options, fitting = self.config.options, self.config.decode_steps
        if options.decode_steps is None and options.use_cache:
            if self._has_own_clock:
                fitting = min(max(int(self.config.burst_s / max(step_s, 1e-6)), 1), fitting)
            scheduler.steps_per_dispatch = fitting
