"""`Scheduler`: which sequences run which of their tokens in the next step. Pure Python, no jax."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rooflax.engine.block_manager import BlockCopy, BlockManager
from rooflax.engine.sequence import Sequence
from rooflax.nn.engine_config import EngineConfig


@dataclass(frozen=True)
class StepPlan:
    """Plan of the next step.

    Attributes:
        decodes: sequences whose last token alone is to run, `num_steps` times over.
        num_steps: decode steps; 1 while prompts run beside them.
        room: tokens per decoding sequence that its blocks hold, for steps or for lookahead tokens.
        prefills: sequences that run several of their tokens, with how many, in the same list as
            the decoding ones.
        copies: of blocks, to be made before anything runs.
        lookahead: per decoding sequence, tokens that may come next, to be verified; a feature's.
    """

    decodes: list[Sequence] = field(default_factory=list)
    num_steps: int = 1
    room: int = 1
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    lookahead: list[list[int]] | None = None

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(sequence for sequence, _ in self.prefills)]

    @property
    def num_tokens(self) -> int:
        """Tokens that it runs."""
        return len(self.decodes) * self.num_steps + sum(count for _, count in self.prefills)


class Scheduler:
    """First come, first served.

    `running` is in order of arrival, and whatever waits has arrived later: who comes last is the
    first to lose its blocks, and the first to get them back. Siblings stand one behind the other,
    and end together.

    Args:
        limit_steps: of decoding sequences and of the most steps, how many a dispatch should run.
        worth_running: of so many decoding sequences and tokens in all, how many tokens a step
            should run now; see `Buckets.worth_running`.

    Attributes:
        token_budget: the most tokens of a step, decoding sequences first and prompts in what they
            leave.
        steps_per_dispatch: decode steps of the next dispatch, if nothing else limits them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        config: EngineConfig,
        *,
        limit_steps: Callable[[list[Sequence], int], int] = lambda decodes, most: most,
        worth_running: Callable[[int, int], int] = lambda decodes, tokens: tokens,
    ):
        self.blocks, self._worth_running = blocks, worth_running
        self._limit_steps = limit_steps
        self.config, self.token_budget = config, config.max_tokens_per_step
        self.steps_per_dispatch = config.decode_steps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._copies: dict[int, list[BlockCopy]] = {}  # of this step, by the sequence that writes

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def new_tokens(self) -> int:
        """The most tokens that a step writes for one sequence."""
        return self.config.new_tokens

    def can_ever_run(self, sequence: Sequence) -> bool:
        """Whether the sequence, with its siblings, could run alone."""
        has_slots = len(sequence.schedule.siblings) <= self.config.max_num_seqs
        return has_slots and self.blocks.fits_at_all(sequence, self.new_tokens)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence, reason: str = "abort", error: str | None = None) -> None:
        """Ends a sequence and its siblings; who has finished stays as it is."""
        for sibling in sequence.schedule.siblings:
            if sibling in self.waiting:
                self.waiting.remove(sibling)
                sibling.finish(reason, error)
            elif sibling in self.running:
                if not sibling.is_finished:
                    sibling.finish(reason, error)
                self.leave(sibling)

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing is left to do.

        A step may run nothing: then it admitted the last of siblings that wait for a fork.
        Sequences of a step that failed run apart, one after the other, before all others.
        """
        suspect = next((s for s in (*self.running, *self.waiting) if s.schedule.is_suspect), None)
        if suspect is not None:
            step = self._plan(suspect.schedule.siblings)
            if step is not None and step.sequences:
                return step
        return self._plan(None)

    def _plan(self, only: list[Sequence] | None) -> StepPlan | None:
        """
        Args:
            only: sequences that may run; None is all.
        """
        preempted_before = self.num_preemptions
        self._copies.clear()
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        budget = self.token_budget
        if only is None:
            budget -= sum(s.num_uncomputed_tokens == 1 for s in self.running)
        for sequence in list(self.running):  # earlier ones take blocks from later ones
            uncomputed = sequence.num_uncomputed_tokens
            if uncomputed == 0:
                continue  # it waits for its siblings
            if sequence not in only if only is not None else sequence.schedule.is_suspect:
                continue
            if uncomputed == 1:
                if self._grow(sequence, 1):
                    decodes.append(sequence)
            elif (count := self._chunk(sequence, budget)) and self._grow(sequence, count):
                prefills.append((sequence, count))
                budget -= count
        if self.num_preemptions == preempted_before:
            self._admit(budget, decodes, prefills, only)
        if prefills and not self.config.runs_whole:
            self._cut(len(decodes), prefills)
        if not decodes and not prefills:
            all_waits = (s.schedule for s in (*self.running, *self.waiting))
            waits = (len(s.siblings) > 1 or s.is_suspect for s in all_waits)
            assert only is not None or not self.has_unfinished or any(waits), "no sequence can run"
            return StepPlan() if self.has_unfinished else None
        num_steps, room = (1, 1) if prefills or only is not None else self._extend(decodes)
        for sequence in decodes:
            self.blocks.reserve_snapshots(sequence, sequence.num_computed_tokens + num_steps)
        for sequence, count in prefills:
            self.blocks.reserve_snapshots(sequence, sequence.num_computed_tokens + count)
        copies = [copy for made in self._copies.values() for copy in made]
        return StepPlan(decodes, num_steps, room, prefills, copies)

    def finish_step(self, step: StepPlan) -> None:
        """Shares what the step computed, and retires who has finished."""
        for sequence in step.sequences:
            if sequence.schedule.slot is None:
                continue
            if sequence.finish_reason != "error":
                self.blocks.publish(sequence)
            if sequence.is_finished:
                self.leave(sequence)

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Continues a running sequence from its sibling's cache."""
        self.blocks.fork(child, parent)
        child.schedule.awaits_fork = False

    def forget_blocks(self, blocks: BlockManager) -> None:
        """Requeues all sequences and empties the cache, whose contents are lost."""
        for sequence in reversed(list(self.running)):
            if sequence.is_finished:
                self.leave(sequence)
            else:
                self.preempt(sequence)
        self.blocks = blocks

    def suspect(self, sequences: list[Sequence]) -> None:
        """Requeues sequences, at the head of the queue in their order, to run apart."""
        for sequence in sorted(sequences, key=self.running.index, reverse=True):
            sequence.schedule.is_suspect = True
            self.preempt(sequence)

    def _cut(self, decodes: int, prefills: list[tuple[Sequence, int]]) -> None:
        """Leaves the last prompts' tokens beyond a full bucket to the next step."""
        total = decodes + sum(count for _, count in prefills)
        excess = total - self._worth_running(decodes, total)
        while excess > 0:
            sequence, count = prefills.pop()
            if count > excess:
                prefills.append((sequence, count - excess))
            excess -= count

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return max(0, min(sequence.num_uncomputed_tokens, self.config.prefill_chunk, budget))

    def _admit(
        self,
        budget: int,
        decodes: list[Sequence],
        prefills: list[tuple[Sequence, int]],
        only: list[Sequence] | None,
    ) -> None:
        """Admits waiting sequences, in order, while slots, blocks and tokens last."""
        while self.waiting and self._free_slots and budget > 0:
            sequence = next((s for s in self.waiting if only is None or s in only), None)
            if sequence is None or (only is None and sequence.schedule.is_suspect):
                return
            num_cached = 0 if sequence.schedule.awaits_fork else self.blocks.num_cached(sequence)
            if not sequence.schedule.awaits_fork and not self._may_enter(sequence, num_cached):
                return
            if self.config.runs_whole and sequence.num_tokens > budget:
                return
            self.waiting.remove(sequence)
            self.blocks.admit(sequence, num_cached)
            if sequence.kv.num_cached_tokens is None:
                sequence.kv.num_cached_tokens = num_cached
                sequence.times.admitted_s = time.perf_counter()
            sequence.schedule.slot = self._free_slots.pop()
            self.running.append(sequence)
            if sequence.schedule.awaits_fork:
                continue
            count = self._chunk(sequence, budget)
            self._copies[id(sequence)] = self.blocks.allocate(sequence, num_cached + count)
            budget -= count
            if sequence.is_prefill:
                prefills.append((sequence, count))
            else:
                decodes.append(sequence)

    def _may_enter(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether there are blocks for it, and none that it lacks is about to be computed."""
        if self._is_being_computed(sequence, num_cached):
            return False
        return self.blocks.can_admit(sequence, num_cached, self.new_tokens)

    def _is_being_computed(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether a running prompt is about to fill the next block that this sequence needs."""
        if not self.blocks.prefix_caching or not sequence.may_share:
            return False
        size, step = self.blocks.block_size, self.blocks.shared_tokens
        end = num_cached // step * step + step
        wanted = self.blocks.hashes(sequence, (sequence.num_tokens - 1) // size)
        at = end // size - 1
        return at < len(wanted) and any(
            s.is_prefill
            and s.num_computed_tokens < end <= s.num_tokens
            and self.blocks.hashes(s, at + 1)[at] == wanted[at]
            for s in self.running
        )

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, taken from the latest arrivals if need be.

        Returns:
            False if the sequence lost its own.
        """
        if sequence.schedule.slot is None:  # lost to an earlier one in this step
            return False
        self.blocks.free_out_of_window(sequence)
        up_to = sequence.num_computed_tokens + count
        if self.blocks.holds(sequence, up_to):
            return True
        while not self.blocks.can_allocate([self.blocks.missing(sequence, up_to)]):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        self._copies[id(sequence)] = self.blocks.allocate(sequence, up_to)
        return True

    def _extend(self, decodes: list[Sequence]) -> tuple[int, int]:
        """Decode steps, and the tokens that fit without preemption."""
        steps = self.steps_per_dispatch
        if steps > 1:
            steps = self._limit_steps(decodes, steps)
        room = max(steps, 1 + self.config.num_draft_tokens)
        if room == 1:
            return 1, 1  # which they have
        room = min(room, *(s.num_remaining_tokens for s in decodes))

        def lacking() -> list[tuple[Sequence, int]]:
            ends = ((s, s.num_computed_tokens + room) for s in decodes)
            return [(s, end) for s, end in ends if not self.blocks.holds(s, end)]

        needed = lacking()
        while needed and not self.blocks.can_allocate([self.blocks.missing(*n) for n in needed]):
            room //= 2
            needed = lacking()
        for sequence, end in needed:
            self.blocks.allocate(sequence, end)
        return min(steps, room), room

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens stay, their K and V are computed again."""
        self.leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.schedule.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes back the sequence's slot and blocks."""
        schedule = sequence.schedule
        self.running.remove(sequence)
        self.blocks.deallocate(sequence)
        assert schedule.slot is not None
        self._free_slots.append(schedule.slot)
        schedule.slot = None
        self._copies.pop(id(sequence), None)
