"""Beam search: the next beams with their tokens, and the finished texts. Pure Python, no jax.

A `BeamGroup` is `num_beams` sequences in lockstep. It chooses as transformers' `_beam_search` does;
blocks and slots are the scheduler's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rooflax.engine.features.feature import Feature
from rooflax.engine.sequence import FeatureState, Sequence, StepOutput
from rooflax.errors import RequestError
from rooflax.fields.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from rooflax.engine.scheduler import Scheduler, StepPlan


class Continuation(NamedTuple):
    """One more token for a beam.

    Attributes:
        score: sum of the log-probabilities of all generated tokens, this one included.
        parent: the beam's index.
    """

    score: float
    parent: int
    token: int


class Hypothesis(NamedTuple):
    """A finished text: its generated tokens, and the sum of their log-probabilities divided by
    their number to the power of the length penalty."""

    score: float
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Beam(FeatureState):
    """A sequence's beam search, and its score once it has finished; see Hypothesis."""

    feature = "beam search"

    group: BeamGroup
    score: float | None = None

    def completion_fields(self) -> dict[str, Any]:
        return {"score": self.score}


@dataclass(eq=False)
class BeamGroup:
    """The beams of one request.

    At first only the first of them runs, over the prompt; the others wait to be forked from it.
    From then on every beam has the same number of tokens.

    Attributes:
        members: one sequence per beam, in no order of merit.
        scores: per beam, the sum of the log-probabilities of its generated tokens.
        finished: the best texts so far, best first, at most one per beam.
    """

    members: list[Sequence]
    scores: list[float] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scores = [0.0] * len(self.members)
        for index, member in enumerate(self.members):
            member.features[Beam], schedule = Beam(self), member.schedule
            schedule.siblings, schedule.awaits_fork = self.members, index > 0
            # enough if the best of all are those that would end it
            member.sampler.num_candidates = len(self.members) + len(member.stop_ids)

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its slot, and its candidates."""
        slots = [member.schedule.slot for member in self.members]
        return None not in slots and not any(m.num_uncomputed_tokens for m in self.members)

    def choose(self) -> dict[int, Continuation]:
        """The best continuations, by the beam that takes each; none if the search is over.

        The best `num_beams` of all candidates end there if their token ends the text or is the
        last one; the best `num_beams` of the others continue. A beam's best continuation stays with
        it, its others go to beams that have none.
        """
        count, first = len(self.members), self.members[0]
        candidates = [
            Continuation(self.scores[index] + logprob, index, token)
            for index, member in enumerate(self.members)
            for token, logprob in member.sampler.candidates
        ]
        best = sorted(candidates, key=lambda c: -c.score)
        length = first.num_output_tokens + 1
        is_last = length >= first.max_tokens
        for beam in best[:count]:
            if is_last or beam.token in first.stop_ids:
                self._finish(beam, length)
        open_ = [beam for beam in best if beam.token not in first.stop_ids][:count]
        if is_last or self._is_over(open_[0].score, length):
            return {}
        return _next_beams(open_, count)

    def _finish(self, beam: Continuation, length: int) -> None:
        tokens = (*self.members[beam.parent].output_tokens, beam.token)
        done = Hypothesis(self._penalised(beam.score, length), tokens)
        ranked = sorted([*self.finished, done], key=lambda h: -h.score)
        self.finished = ranked[: len(self.members)]

    def _penalised(self, score: float, length: int) -> float:
        penalty = self.members[0].params.length_penalty
        assert penalty is not None
        return score / length**penalty

    def _is_over(self, best: float, length: int) -> bool:
        """Whether there are texts enough, and no open beam is held to become better.

        Args:
            best: sum of the log-probabilities of the best open beam.
            length: its generated tokens.
        """
        first = self.members[0]
        params = first.params
        assert params.length_penalty is not None
        if len(self.finished) < len(self.members):
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = first.max_tokens
        return self._penalised(best, length) <= self.finished[-1].score

    def go_on(self, next_beams: dict[int, Continuation], now_s: float) -> None:
        """Gives every beam the tokens of its continuation."""
        for index, beam in next_beams.items():
            if beam.parent != index:
                self.members[index].tokens = list(self.members[beam.parent].tokens)
        for index, beam in next_beams.items():
            self.members[index].tokens.append(beam.token)
            self.scores[index] = beam.score
        for member in self.members:
            member.sampler.candidates = ()
        self.members[0].times.tokens_s.append(now_s)

    def end(self, now_s: float) -> None:
        """Makes the beams the finished texts, the best one first."""
        times_s = [*self.members[0].times.tokens_s, now_s]
        num_cached = self.members[0].kv.num_cached_tokens
        for member, done in zip(self.members, self.finished, strict=True):
            member.tokens = [*member.prompt_tokens, *done.tokens]
            member.times.tokens_s = times_s[: len(done.tokens)]
            member.kv.num_cached_tokens, member.features[Beam].score = num_cached, done.score
            member.finish("stop" if done.tokens[-1] in member.stop_ids else "length")


def _next_beams(chosen: list[Continuation], count: int) -> dict[int, Continuation]:
    """Assigns continuations to `count` beams."""
    next_beams: dict[int, Continuation] = {}
    others = []
    for beam in chosen:
        if beam.parent in next_beams:
            others.append(beam)
        else:
            next_beams[beam.parent] = beam
    idle = [index for index in range(count) if index not in next_beams]
    return next_beams | dict(zip(idle, others, strict=True))


def advance(scheduler: Scheduler, now_s: float) -> list[BeamGroup]:
    """Advances each search whose beams have all run by a token, or ends it; returns them.

    A beam continues from its parent's cache.
    """
    beams = map(Beam.of, scheduler.running)
    groups = {id(beam.group): beam.group for beam in beams if beam is not None}
    ready = [group for group in groups.values() if group.is_ready]
    for group in ready:
        next_beams = group.choose()
        for child, continued in next_beams.items():
            if child != continued.parent:
                scheduler.fork(group.members[child], group.members[continued.parent])
        if next_beams:
            group.go_on(next_beams, now_s)
        else:
            group.end(now_s)
            for member in group.members:
                scheduler.leave(member)
    return ready


class Beams(Feature):
    """Beam search as a feature of the engine."""

    state = Beam

    @classmethod
    def prepare(cls, sequences: list[Sequence]) -> None:
        if sequences[0].params.num_beams > 1:
            BeamGroup(sequences)

    @classmethod
    def check(cls, sequence: Sequence, vocab_size: int, num_slots: int) -> None:
        beams, params = sequence.params.num_beams, sequence.params
        if Beam.of(sequence) is None:
            return
        if beams > num_slots:
            raise RequestError(
                f"num_beams is {beams} and max_num_seqs {num_slots}; every beam runs at the same "
                f"time, so raise the latter or lower the former."
            )
        if beams + len(sequence.stop_ids) > MAX_LOGPROBS:
            raise RequestError(
                f"num_beams is {beams} and {len(sequence.stop_ids)} ids end the text; together "
                f"they may be {MAX_LOGPROBS}."
            )
        allowed = set(params.allowed_token_ids) or set(range(vocab_size))
        num_open = len(allowed - set(params.banned_token_ids) - sequence.stop_ids)
        if num_open < beams:
            raise RequestError(
                f"num_beams is {beams} and {num_open} ids may be chosen without ending the text; "
                f"every beam needs one."
            )

    def limit_steps(self, decodes: list[Sequence], most: int) -> int:
        chooses = any(s.sampler.num_candidates is not None for s in decodes)
        return 1 if chooses else most  # the host chooses every token

    def after_step(self, plan: StepPlan) -> list[StepOutput]:
        """Ends the searches with a failed beam, and advances those whose beams have all run."""
        now_s, outputs = time.perf_counter(), []
        for sequence in plan.sequences:
            if sequence.finish_reason == "error" and Beam.of(sequence) is not None:
                outputs += self.core.fail(sequence, str(sequence.error), now_s)
        for group in advance(self.core.scheduler, now_s):
            self.core.metrics.token(group.members[0], now_s)
            ended = [member for member in group.members if member.is_finished]
            self.core.metrics.finished_all(ended, now_s)
            outputs += [member.output_since(0) for member in ended]
        return outputs
