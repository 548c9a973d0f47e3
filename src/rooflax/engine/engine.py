"""`Engine`: token ids in, token ids out.

It knows requests, sequences and steps. It knows no text, no files and no chat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from jax.sharding import Mesh

from rooflax.engine.block_manager import BlockManager
from rooflax.engine.packing import StepResult
from rooflax.engine.runner import BLOCK_SIZE, Runner
from rooflax.engine.scheduler import ScheduledStep, Scheduler
from rooflax.engine.sequence import Sequence, TokenLogprobs
from rooflax.errors import RequestError
from rooflax.models.model import Model
from rooflax.nn.execution import ExecutionOptions

DEFAULT_PREFILL_CHUNK = 512
MOST_DECODE_STEPS = 32
BURST_S = 0.15
"""Decode steps that fit into this time go into one dispatch: a stream shall look smooth."""


class Engine:
    """Runs requests to their end, `num_slots` at a time.

    Args:
        model: with stacked layers exactly when options.layers is "scan".
        num_slots: sequences that run at once.
        max_tokens: longest context of any sequence, prompt included.
        mesh: devices with a "tensor" axis; None for one device.
    """

    def __init__(
        self,
        model: Model,
        options: ExecutionOptions,
        *,
        num_slots: int,
        max_tokens: int,
        kv_dtype: str = "float32",
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        mesh: Mesh | None = None,
    ):
        self.model, self.options = model, options
        self.num_slots, self.max_tokens = num_slots, max_tokens
        chunk = min(prefill_chunk, max_tokens) if options.use_cache else max_tokens
        steps = (options.decode_steps or MOST_DECODE_STEPS) if options.use_cache else 1
        self.runner = Runner(
            model,
            options,
            num_slots=num_slots,
            max_tokens=max_tokens,
            prefill_chunk=chunk,
            decode_steps=steps,
            kv_dtype=kv_dtype,
            mesh=mesh,
        )
        blocks = BlockManager(self.runner.windows, self.runner.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            blocks, num_slots=num_slots, prefill_chunk=chunk, decode_steps=steps
        )

    @property
    def kv_cache_bytes(self) -> int:
        return 0 if self.runner.cache is None else self.runner.cache.num_bytes

    def add(self, sequences: Seq[Sequence]) -> None:
        """Queues sequences; they run as `step` is called."""
        now = time.perf_counter()
        for sequence in sequences:
            sequence.arrival_s = now
            self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; one that has finished stays as it is."""
        self.scheduler.cancel(sequence)

    def warm_up(self, sequences: Seq[Sequence]) -> None:
        """Compiles everything these sequences will need."""
        self.runner.warm_up(sequences)

    def temporary_bytes(self) -> int:
        """Device memory for intermediates of the largest program; 0 when nothing is jitted.

        Compiles again where no persistent cache keeps the programs.
        """
        analyses = [low.compile().memory_analysis() for _, low in self.runner.lowered()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[tuple[Sequence, list[int]]]:
        """Runs one dispatch; the sequences that got tokens, each with its new ones."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        start_s = time.perf_counter()
        result = self.runner.run(step)
        now_s = time.perf_counter()
        self._set_pace((now_s - start_s) / step.num_steps)
        new = _postprocess(step, result, now_s)
        self.scheduler.finish_step(step)
        return new

    def _set_pace(self, step_s: float) -> None:
        """Chooses the steps of the next dispatch, if the caller did not.

        Args:
            step_s: of the last decode step, or of a prefill, which takes no less.
        """
        if self.options.decode_steps is None and self.options.use_cache:
            fitting = int(BURST_S / max(step_s, 1e-6))
            self.scheduler.pace = min(max(fitting, 1), self.scheduler.decode_steps)


def check_prompt(prompt_tokens: Seq[int], vocab_size: int, max_tokens: int) -> None:
    """Refuses a prompt that cannot run.

    Raises:
        RequestError: with both numbers.
    """
    if not prompt_tokens:
        raise RequestError("The prompt has no tokens; give at least one.")
    highest, lowest = max(prompt_tokens), min(prompt_tokens)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise RequestError(
            f"The prompt holds the token id {wrong}; this model knows 0 to {vocab_size - 1}."
        )
    if len(prompt_tokens) >= max_tokens:
        raise RequestError(
            f"The prompt has {len(prompt_tokens)} tokens and the context holds {max_tokens}, "
            f"which leaves no room for a new one; shorten the prompt or raise --max-model-len."
        )


def _postprocess(
    step: ScheduledStep, result: StepResult, now_s: float
) -> list[tuple[Sequence, list[int]]]:
    new: list[tuple[Sequence, list[int]]] = []
    tokens = result.tokens
    for row, sequence in enumerate(step.sequences):
        added: list[int] = []
        sequence.num_computed_tokens += step.num_tokens[row]
        if sequence.is_prefill:
            continue
        for index in range(tokens.shape[0]):
            sequence.append(int(tokens[index, row]), now_s)
            added.append(int(tokens[index, row]))
            if sequence.params.logprobs is not None:
                chosen, top = result.logprobs(index, row, sequence.params.logprobs)
                sequence.logprobs.append(TokenLogprobs(chosen, tuple(top)))
            if sequence.is_finished:
                break
            if index:
                sequence.num_computed_tokens += 1
        new.append((sequence, added))
    return new
