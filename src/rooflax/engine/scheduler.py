"""`Scheduler`: which sequences run which of their tokens in the next step. Pure Python, no jax."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rooflax.engine.block_manager import BlockManager
from rooflax.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class ScheduledStep:
    """One dispatch.

    Attributes:
        sequences: the rows.
        num_tokens: per row, how many uncomputed tokens it runs.
        is_prefill: prompts, in chunks; otherwise one token per row and `num_steps` times over.
        num_steps: decode steps in this dispatch.
    """

    sequences: list[Sequence]
    num_tokens: list[int]
    is_prefill: bool
    num_steps: int = 1


class Scheduler:
    """First come, first served; prompts before decoding.

    A sequence is admitted when a slot is free and the blocks for its longest possible context can
    be promised to it, so what runs can always run to its end.

    Attributes:
        decode_steps: the most steps of a dispatch.
        pace: the steps of the next one; the engine may change it at any time.
    """

    def __init__(
        self, blocks: BlockManager, *, num_slots: int, prefill_chunk: int, decode_steps: int
    ):
        self.blocks = blocks
        self.prefill_chunk = prefill_chunk
        self.decode_steps = decode_steps
        self.pace = decode_steps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(reversed(range(num_slots)))
        self._reserved: dict[int, list[int]] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forgets a sequence, waiting or running."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.finish("abort")
        elif sequence in self.running:
            sequence.finish("abort")
            self._retire(sequence)

    def schedule(self) -> ScheduledStep | None:
        """The next step; None when nothing is left to do."""
        self._admit()
        prompts = [s for s in self.running if s.is_prefill]
        if prompts:
            num_tokens = [min(s.num_uncomputed_tokens, self.prefill_chunk) for s in prompts]
            self._allocate(prompts, num_tokens)
            return ScheduledStep(prompts, num_tokens, is_prefill=True)
        if self.running:
            rows = list(self.running)
            num_steps = min(self.pace, *(s.num_remaining_tokens for s in rows))
            self._allocate(rows, [num_steps] * len(rows))
            return ScheduledStep(rows, [1] * len(rows), is_prefill=False, num_steps=num_steps)
        return None

    def finish_step(self, step: ScheduledStep) -> None:
        """Retires what has finished."""
        for sequence in step.sequences:
            if sequence.is_finished and sequence in self.running:
                self._retire(sequence)

    def _admit(self) -> None:
        new_tokens = max(self.prefill_chunk, self.decode_steps)
        while self.waiting and self._free_slots:
            needed = self.blocks.reservation(self.waiting[0], new_tokens)
            if not self.blocks.can_reserve(needed):
                return
            sequence = self.waiting.popleft()
            self.blocks.reserve(sequence, needed)
            sequence.slot = self._free_slots.pop()
            sequence.status = SequenceStatus.RUNNING
            self._reserved[id(sequence)] = needed
            self.running.append(sequence)

    def _allocate(self, sequences: list[Sequence], num_tokens: list[int]) -> None:
        for sequence, count in zip(sequences, num_tokens, strict=True):
            self.blocks.allocate(sequence, sequence.num_computed_tokens + count)

    def _retire(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.deallocate(sequence, self._reserved.pop(id(sequence)))
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
