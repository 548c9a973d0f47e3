"""Speculative decoding: who drafts tokens, and whether that pays. Pure Python, no jax.

Drafted tokens run together with the last real one, the sampler chooses at every position by its
own rule, and a draft stays as long as it equals that choice. So drafts change how many tokens a
step gives, and never which.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from rooflax.engine.buckets import StepKind
from rooflax.engine.features.feature import CallTimes, Feature
from rooflax.engine.sequence import FeatureState, Sequence
from rooflax.nn.execution import DEFAULT_DRAFT_TOKENS

if TYPE_CHECKING:
    from rooflax.engine.packing import StepResult
    from rooflax.engine.runner import Compiled, StepCall
    from rooflax.engine.scheduler import StepPlan

LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
FIRST_ACCEPTANCE = 0.5
"""Share of drafts that is expected to be accepted while nothing is known."""
MEMORY = 0.8
"""Weight of the past in the running means."""
SHORTEST_REST, LONGEST_REST = 32, 1024
"""Decode steps until drafts are tried again."""
TRIALS = 4
"""Steps with drafts that are made before it is asked whether they pay."""
AWAKE_STEPS = 4
"""Decode steps until the next draft after an empty one."""


class Drafter:
    """Drafts tokens for sequences; a draft may be empty, and here all are.

    Attributes:
        num_bytes: of device memory that it takes.
    """

    num_bytes = 0

    def propose(self, sequences: Seq[Sequence], num_tokens: int) -> list[list[int]]:
        """Proposes at most `num_tokens` draft tokens for each sequence."""
        return [[] for _ in sequences]

    def warm_up(self, report: Callable[[Compiled], None], num_tokens: int) -> list[Compiled]:
        """Compiles what drafting can need, once; lines of the warm-up report."""
        return []

    def reset(self) -> None:
        """Forgets everything, after a failure."""


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
    """End of each n-gram in a growing list of tokens, the end of the list apart."""

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
                while len(draft) < count:  # a repetition that has reached the end continues
                    draft.append(draft[end + len(draft) - len(tokens)])
                return draft
        return []


@dataclass
class DraftCounts(FeatureState):
    """Drafts that were run for a sequence, and those that were accepted."""

    feature = "speculative decoding"

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def completion_fields(self) -> dict[str, Any]:
        return asdict(self)


class Speculation(Feature):
    """Speculative decoding as a feature of the engine: asks a drafter where that pays, by what
    steps took and how many drafts were accepted.

    A step with drafts pays if it gives more tokens per second than a decode step:
    (rows + acceptance * drafts) / verify_s > rows / decode_s. Where it does not, only a few trials
    are made, ever more seldom.

    Args:
        longest: the most drafts of a sequence in a step.

    Attributes:
        acceptance: running mean of the share of drafts that were accepted.
    """

    state = DraftCounts

    def __init__(self, drafter: Drafter, longest: int = DEFAULT_DRAFT_TOKENS):
        self.drafter, self.num_lookahead_tokens = drafter, longest
        self.num_bytes = drafter.num_bytes
        self.acceptance = FIRST_ACCEPTANCE
        self._decode_s: dict[int, float] = {}
        self._verify_s: dict[int, float] = {}
        self._trials_left = TRIALS
        self._resting, self._rest = 0, SHORTEST_REST
        self._left_out: WeakSet[Sequence] = WeakSet()

    def warm_up(self, report: Callable[[Compiled], None]) -> list[Compiled]:
        return self.drafter.warm_up(report, self.num_lookahead_tokens)

    def reset(self) -> None:
        self.drafter.reset()

    def limit_steps(self, decodes: list[Sequence], most: int) -> int:
        """As many as until drafts may be wanted again, where the caller did not say how many."""
        is_open = self.core.config.options.decode_steps is None and self.num_lookahead_tokens
        return min(most, self._resting or AWAKE_STEPS) if is_open else most

    def before_step(self, plan: StepPlan) -> StepPlan:
        """Drafts for the rows of a decode step, unless the host must see every token of one."""
        if plan.prefills or any(s.sampler.needs_host for s in plan.decodes):
            return plan
        try:
            drafts = self.propose(plan.decodes, plan.room - 1)
        except BaseException as error:
            if not self.core.isolates(error):
                raise
            self.reset()  # a drafter's fault costs drafts
            return plan
        return replace(plan, lookahead=drafts) if drafts else plan

    def after_call(self, call: StepCall, result: StepResult, times: CallTimes) -> None:
        rows, seconds = len(call.sequences), times.ended_s - times.prepared_s
        if call.lookahead is not None:
            self._count(call, result, call.lookahead, seconds)
        elif call.shape.kind is StepKind.DECODE:
            self.decoded(rows, result.num_steps, seconds)

    def _count(
        self, call: StepCall, result: StepResult, lookahead: list[list[int]], seconds: float
    ) -> None:
        """Counts accepted drafts; a row that drafts made non-finite restarts without them."""
        metrics, blocks = self.core.metrics, self.core.scheduler.blocks
        num_accepted, num_drafts = 0, sum(map(len, lookahead))
        for row, (sequence, draft) in enumerate(zip(call.sequences, lookahead, strict=True)):
            counts = sequence.features.setdefault(DraftCounts, DraftCounts())
            accepted = result.num_tokens(row) - 1
            counts.num_draft_tokens += len(draft)
            counts.num_accepted_tokens += accepted
            num_accepted += accepted
            if draft and not result.is_finite(0, row):  # it may be the drafts
                self._left_out.add(sequence)
                self.core.restart(sequence)
            elif accepted < len(draft):
                blocks.keep_state(sequence, accepted + 1)
        self.verified(len(call.sequences), num_drafts, num_accepted, seconds)
        metrics.num_draft_tokens += num_drafts
        metrics.num_accepted_tokens += num_accepted

    def propose(self, sequences: Seq[Sequence], room: int) -> list[list[int]]:
        """Drafts for the rows of a decode step; none at all where they would not pay.

        Args:
            room: the most drafts of a row.
        """
        rows = len(sequences)
        room = min(room, self.num_lookahead_tokens)
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
        """A step with drafts took so long, drafting included, and so many of them were accepted."""
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
