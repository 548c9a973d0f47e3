"""Speculative decoding: who drafts tokens, and whether that pays. Pure Python, no jax.

Drafted tokens run together with the last real one, the sampler chooses at every position by its
own rule, and a draft stays as long as it equals that choice. So drafts change how many tokens a
step gives, and never which.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from rooflax.engine.sequence import Sequence
from rooflax.nn.execution import DEFAULT_DRAFT_TOKENS

LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
FIRST_ACCEPTANCE = 0.5
"""Share of drafts that is expected to hold while nothing is known."""
MEMORY = 0.8
"""Weight of the past in the running means."""
SHORTEST_REST, LONGEST_REST = 32, 1024
"""Decode steps until drafts are tried again."""
TRIALS = 4
"""Steps with drafts that are made before it is asked whether they pay."""
AWAKE_STEPS = 4
"""Decode steps until the next draft after an empty one."""


class Drafter:
    """Guesses how sequences go on; a guess may be empty, and here all are."""

    def propose(self, sequences: Seq[Sequence], num_tokens: int) -> list[list[int]]:
        """At most `num_tokens` guesses for each sequence."""
        return [[] for _ in sequences]

    def warm_up(self, num_tokens: int) -> None:
        """Compiles what drafting will need."""

    def warm_up_all(self, report: Callable[[Any], None], num_tokens: int) -> list[Any]:
        """Compiles what drafting for any sequence can need; the lines of a warm-up report."""
        return []

    def reset(self) -> None:
        """Forgets everything, after a failure."""

    @property
    def num_bytes(self) -> int:
        """Of device memory that it takes."""
        return 0


class NgramDrafter(Drafter):
    """Continues as the sequence itself went on when its last tokens last stood in it.

    Source: Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Sequence, _Ngrams] = WeakKeyDictionary()

    def propose(self, sequences: Seq[Sequence], num_tokens: int) -> list[list[int]]:
        drafts = []
        for sequence in sequences:
            if sequence not in self._seen:
                self._seen[sequence] = _Ngrams()
            drafts.append(self._seen[sequence].continuation(sequence.tokens, num_tokens))
        return drafts


class _Ngrams:
    """Where each n-gram of a growing list of tokens last ended, the end of the list apart."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        for end in range(self._indexed, len(tokens)):
            for n in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for n in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
            end = self._ends.get(tuple(tokens[-n:]))
            if end is not None:
                draft = tokens[end : end + count]
                while len(draft) < count:  # a repetition that has reached the end goes on
                    draft.append(draft[end + len(draft) - len(tokens)])
                return draft
        return []


class Speculation:
    """All that the engine knows of drafts: asks a drafter where that pays, by what steps took and
    how many drafts held.

    A step with drafts pays if it gives more tokens per second than a decode step:
    (rows + acceptance * drafts) / verify_s > rows / decode_s. Where it does not, only a few trials
    are made, ever more seldom.

    Args:
        longest: the most drafts of a sequence in a step.

    Attributes:
        acceptance: running mean of the share of drafts that held.
    """

    def __init__(self, drafter: Drafter, longest: int = DEFAULT_DRAFT_TOKENS):
        self.drafter, self.longest = drafter, longest
        self.acceptance = FIRST_ACCEPTANCE
        self._decode_s: dict[int, float] = {}
        self._verify_s: dict[int, float] = {}
        self._trials_left = TRIALS
        self._resting, self._rest = 0, SHORTEST_REST
        self._left_out: WeakSet[Sequence] = WeakSet()

    @classmethod
    def none(cls) -> Speculation:
        """Nobody drafts."""
        return cls(Drafter(), 0)

    @property
    def num_bytes(self) -> int:
        """Of device memory that the drafter takes."""
        return self.drafter.num_bytes

    def warm_up(self) -> None:
        """Compiles what drafting will need."""
        self.drafter.warm_up(self.longest)

    def warm_up_all(self, report: Callable[[Any], None]) -> list[Any]:
        """Compiles what drafting for any sequence can need; the lines of a warm-up report."""
        return self.drafter.warm_up_all(report, self.longest)

    def reset(self) -> None:
        """Forgets what the drafter keeps of sequences, after a failure."""
        self.drafter.reset()

    def leave_out(self, sequence: Sequence) -> None:
        """No drafts for this one any more."""
        self._left_out.add(sequence)

    @property
    def most_steps(self) -> int | None:
        """Decode steps until drafts may be wanted again; None is any number."""
        return (self._resting or AWAKE_STEPS) if self.longest else None

    def propose(self, sequences: Seq[Sequence], room: int) -> list[list[int]]:
        """Drafts for the rows of a decode step; none at all where they would not pay.

        Args:
            room: the most drafts of a row.
        """
        rows = len(sequences)
        room = min(room, self.longest)
        if rows not in self._decode_s or self._resting > 0 or room < 1:
            return []
        drafts = self.drafter.propose(sequences, room)
        if self._left_out:
            pairs = zip(sequences, drafts, strict=True)
            drafts = [[] if sequence in self._left_out else draft for sequence, draft in pairs]
        num_drafts = sum(map(len, drafts))
        if num_drafts == 0:
            return []
        if self._trials_left > 0 or self._is_worthwhile(rows, num_drafts):
            return drafts
        self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._trials_left = TRIALS
        return []

    def _is_worthwhile(self, rows: int, num_drafts: int) -> bool:
        if rows not in self._verify_s:
            return True
        gained = (rows + self.acceptance * num_drafts) / rows
        return gained * self._decode_s[rows] > self._verify_s[rows]

    def decoded(self, rows: int, num_steps: int, seconds: float) -> None:
        """A dispatch of decode steps took so long."""
        _mean_in(self._decode_s, rows, seconds / num_steps)
        self._resting = max(0, self._resting - num_steps)

    def verified(self, rows: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """A step with drafts took so long, drafting included, and so many of them held."""
        _mean_in(self._verify_s, rows, seconds)
        share = num_accepted / num_drafts
        self.acceptance = MEMORY * self.acceptance + (1 - MEMORY) * share
        self._trials_left = max(0, self._trials_left - 1)
        if self._trials_left == 0 and self._is_worthwhile(rows, num_drafts):
            self._rest = SHORTEST_REST


def _mean_in(means: dict[int, float], key: int, value: float) -> None:
    """Moves a running mean; a single slow call moves it by at most a factor of two."""
    before = means.get(key, value)
    means[key] = MEMORY * before + (1 - MEMORY) * min(value, 6 * before)
