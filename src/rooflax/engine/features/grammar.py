"""`GrammarFeature`: sequences whose text follows a constraint, and `MaskReuse` beside them. No jax.

A constraint's mask follows from every token before it, and the host computes it. But within a
string of a JSON schema the mask mostly stays the same. So a dispatch runs several steps with the
masks of its first one. A token counts if the mask before it is still that one: then it is the token
of a single step. The others are run again. So reuse changes how many tokens a dispatch gives, and
never which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rooflax.engine.buckets import StepKind
from rooflax.engine.features.feature import CallTimes, Feature
from rooflax.engine.sequence import ENDS_EARLY, Constraint, FeatureState, Sequence

if TYPE_CHECKING:
    from rooflax.engine.packing import StepResult
    from rooflax.engine.runner import StepCall

MEMORY = 0.8
"""Weight of the past in the running means."""
LONGEST_GAP_S = 0.01
"""A longer time between two dispatches is not the engine's own work."""


@dataclass
class Constrained(FeatureState):
    """State of a sequence with a constraint: the running mean of how often a token leaves its mask
    unchanged."""

    feature = "structured output"

    mask_stays: float = 0.5


def constrain(sequence: Sequence, constraint: Constraint) -> None:
    """Constrains the sequence's text from here on."""
    sequence.sampler.constraint = constraint
    sequence.features[Constrained] = Constrained()


class MaskReuse:
    """Chooses how many steps pay, by what dispatches take and how often masks stay.

    Attributes:
        gap_s: running mean of the host's time from one dispatch to the next.
        first_s, more_s: running means of a dispatch of one step, and of what each more takes.
    """

    def __init__(self) -> None:
        self.gap_s = self.first_s = 0.0
        self.more_s: float | None = None

    def observe(self, gap_s: float, num_steps: int, seconds: float) -> None:
        """A dispatch of decode steps began `gap_s` after the end of the one before it."""
        self.gap_s = _mean(self.gap_s, min(gap_s, LONGEST_GAP_S))
        if num_steps == 1:
            self.first_s = _mean(self.first_s, seconds)
        else:
            more_s = max(0.0, (seconds - self.first_s) / (num_steps - 1))
            self.more_s = _mean(self.more_s or more_s, more_s)

    def _seconds(self, num_steps: int) -> float:
        more_s = self.first_s if self.more_s is None else self.more_s
        return self.gap_s + self.first_s + (num_steps - 1) * more_s

    def num_steps(self, sequences: list[Sequence], most: int) -> int:
        """The number of steps, up to `most`, that gives the most tokens per second.

        n steps give n tokens to a sequence without a constraint, and 1 + p + ... + p^(n-1) to one
        whose mask stays with probability p.
        """
        states = [state for state in map(Constrained.of, sequences) if state is not None]
        free, stays = len(sequences) - len(states), [state.mask_stays for state in states]
        tokens, expected, best = 0.0, [1.0] * len(stays), 0.0
        for steps in range(1, most + 1):
            tokens += free + sum(expected)
            rate = tokens / max(self._seconds(steps), 1e-9)
            if rate <= best:
                return steps - 1
            best, expected = rate, [e * p for e, p in zip(expected, stays, strict=True)]
        return most


class GrammarFeature(Feature):
    """Constraints as a feature of the engine: follows each token, appends what is forced, and
    chooses the decode steps of a dispatch."""

    state = Constrained

    def __init__(self) -> None:
        self._reuse, self._last_end_s = MaskReuse(), 0.0

    def limit_steps(self, decodes: list[Sequence], most: int) -> int:
        runner = self.core.runner
        if all(s.sampler.constraint is None for s in decodes):
            return most
        if runner.model.config.groups.state is not None:
            return 1  # a state does not go back where a token is discarded
        if runner.masks.exchanges:
            return most
        return self._reuse.num_steps(decodes, most) if self.core.has_own_clock else 1

    def after_call(self, call: StepCall, result: StepResult, times: CallTimes) -> None:
        if call.shape.kind is StepKind.DECODE:
            gap_s, seconds = times.begun_s - self._last_end_s, times.ended_s - times.begun_s
            self._reuse.observe(gap_s, result.num_steps, seconds)
        self._last_end_s = times.ended_s

    def after_token(self, sequence: Sequence, result: StepResult | None) -> bool:
        constraint, state = sequence.sampler.constraint, Constrained.of(sequence)
        if constraint is None or state is None or sequence.finish_reason == "stop":
            return True
        _follow(sequence, constraint)
        if sequence.is_finished or result is None or not result.reuses_masks:
            return True
        stays = self.core.runner.masks.is_sent(sequence.schedule.slot, constraint.mask)
        state.mask_stays = _mean(state.mask_stays, stays)
        return stays

    def forced_token(self, sequence: Sequence) -> int | None:
        """The only token that the constraint allows next, if there is just one.

        None where more is asked than the token, and where something else may forbid it.
        """
        params, sampler = sequence.params, sequence.sampler
        asks = params.logprobs is not None or sampler.num_candidates is not None
        if sampler.constraint is None or asks or params.allowed_token_ids or sequence.is_finished:
            return None
        token = _only_one(sampler.constraint.mask)
        other = (sequence.stop_ids, params.banned_token_ids, params.logit_bias)
        return None if any(token in ids for ids in other) else token


def _follow(sequence: Sequence, constraint: Constraint) -> None:
    constraint.accept(sequence.tokens[-1])
    num_output = sequence.num_output_tokens
    if constraint.error is not None and sequence.is_finished:
        return  # nothing can follow, and nothing has to
    if constraint.error is not None:
        sequence.finish("error", constraint.error)
    elif constraint.is_complete and num_output < sequence.params.min_tokens:
        sequence.finish(
            "error",
            f"{ENDS_EARLY} after {num_output} tokens and min_tokens is "
            f"{sequence.params.min_tokens}; lower it.",
        )
    elif constraint.is_complete:
        sequence.finish("stop")


def _only_one(mask: np.ndarray) -> int | None:
    """The one token of a mask; None if there are more, or none."""
    places = mask.nonzero()[0]
    if len(places) != 1:
        return None
    word = int(mask[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(places[0]) + word.bit_length() - 1


def _mean(before: float, value: float) -> float:
    return MEMORY * before + (1 - MEMORY) * value
