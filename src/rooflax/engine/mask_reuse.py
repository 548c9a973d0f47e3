"""`MaskReuse`: several decode steps in one dispatch beside sequences with a constraint. No jax.

A constraint's mask follows from every token before it, and the host computes it. But within a
string of a JSON schema the mask mostly stays the same. So a dispatch runs several steps with the
masks of its first one. A token counts if the mask before it is still that one: then it is the token
of a single step. The others are run again. So reuse changes how many tokens a dispatch gives, and
never which.
"""

from __future__ import annotations

from rooflax.engine.sequence import Sequence

MEMORY = 0.8
"""Weight of the past in the running means."""
LONGEST_GAP_S = 0.01
"""A longer time between two dispatches is not the engine's own work."""


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
        free = sum(s.sampler.constraint is None for s in sequences)
        stays = [s.mask_stays for s in sequences if s.sampler.constraint is not None]
        tokens, expected, best = 0.0, [1.0] * len(stays), 0.0
        for steps in range(1, most + 1):
            tokens += free + sum(expected)
            rate = tokens / max(self._seconds(steps), 1e-9)
            if rate <= best:
                return steps - 1
            best, expected = rate, [e * p for e, p in zip(expected, stays, strict=True)]
        return most

    def watch(self, sequence: Sequence, stayed: bool) -> None:
        """Whether a token of a sequence left its mask as it was."""
        sequence.mask_stays = _mean(sequence.mask_stays, stayed)


def _mean(before: float, value: float) -> float:
    return MEMORY * before + (1 - MEMORY) * value
