"""Warming up and timing: the rules that make a figure one.

A job is a call that runs the whole workload and says when its tokens arrived. It is warmed up
until a run compiles nothing; a trial in which something compiled is void and taken again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooflax.bench.ceilings import Ceiling
from rooflax.bench.timeline import Timeline
from rooflax.engine.compilation import count_compilations
from rooflax.errors import EngineError

MAX_WARM_UPS = 6

Job = Callable[[], Timeline]
ReadCeiling = Callable[[], Ceiling]


@dataclass(frozen=True)
class Trial:
    """One timed run.

    Attributes:
        timeline: when its tokens arrived.
        compilations: compile requests while the clock ran; above 0 the trial is void.
        before, after: the ceilings around it.
    """

    timeline: Timeline
    compilations: int
    before: Ceiling
    after: Ceiling

    @property
    def is_void(self) -> bool:
        return self.compilations > 0


def warm_up(job: Callable[[], object]) -> int:
    """Runs the whole job until a run compiles nothing; how many runs that took.

    Raises:
        EngineError: it still compiles after MAX_WARM_UPS runs.
    """
    for count in range(1, MAX_WARM_UPS + 1):
        with count_compilations() as compiled:
            job()
        if compiled.requests == 0:
            return count
    raise EngineError(
        f"something still compiles in run {MAX_WARM_UPS} of the same work: a shape or a constant "
        f"changes from run to run, so no figure would be valid"
    )


def run_trial(job: Job, ceiling: ReadCeiling) -> Trial:
    """One timed run with the ceilings read right before and after it."""
    before = ceiling()
    with count_compilations() as compiled:
        timeline = job()
    return Trial(timeline, compiled.requests, before, ceiling())


def run_trials(job: Job, ceiling: ReadCeiling, count: int) -> tuple[list[Trial], list[Trial]]:
    """(`count` valid trials, the void ones that had to be taken again).

    Raises:
        EngineError: more were void than were wanted.
    """
    valid: list[Trial] = []
    void: list[Trial] = []
    while len(valid) < count:
        trial = run_trial(job, ceiling)
        (void if trial.is_void else valid).append(trial)
        if len(void) > count:
            raise EngineError(
                f"{len(void)} trials are void, because something compiled while the clock ran; "
                f"no figure is valid"
            )
    return valid, void
