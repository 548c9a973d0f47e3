"""`Engine`: token ids in, token ids out.

It knows requests, sequences and steps. It knows no text, no files and no chat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
import numpy as np

from rooflax.engine import exhaustion
from rooflax.engine.beams import advance, check_beams
from rooflax.engine.block_manager import BlockManager
from rooflax.engine.buckets import Buckets, StepKind
from rooflax.engine.mask_reuse import MaskReuse
from rooflax.engine.metrics import Metrics
from rooflax.engine.packing import StepResult, unpack_logprobs
from rooflax.engine.pooled_steps import take_vector
from rooflax.engine.request_checks import check_sequence
from rooflax.engine.runner import SMALLEST_STEP, Call, Compiled, Runner
from rooflax.engine.scheduler import ScheduledStep, Scheduler
from rooflax.engine.sequence import NOT_FINITE, RowError, Sequence, StepOutput, with_siblings
from rooflax.engine.speculation import Speculation
from rooflax.errors import EngineError, RequestError, first_line
from rooflax.models.offloading import AnyModel
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.mesh import shards_of
from rooflax.ops import accelerator

FIRST_BUDGET = 128
"""Tokens of a server's steps before any has been timed, and where several processes must agree."""
FEWEST_TIMED = 32
"""Tokens of a step from which its time says what a token of a prompt takes."""
BURST_S = 0.15
"""Decode steps that fit into this time go into one dispatch: a stream shall look smooth."""
FAILED = "The request failed at work"
NOT_ALLOWED = (
    "No token was left to choose, so the request was ended; loosen what it bans or allows, or its "
    "grammar."
)


class Engine:
    """Runs requests to their end, `config.max_num_seqs` at a time.

    Args:
        model: with stacked layers exactly when options.layers is "scan"; any other pair is an
            EngineError.
        config: what it leaves open becomes what this model needs.
        speculation: who drafts tokens; None is nobody.
    """

    def __init__(
        self, model: AnyModel, config: EngineConfig, speculation: Speculation | None = None
    ):
        _check_layers(model, config)
        assert speculation is None or config.options.use_cache
        self.model, self.speculation = model, speculation or Speculation.none()
        self.config = config.fitted(
            is_causal=model.config.is_causal,
            prefill_chunk=accelerator.prefill_chunk(),
            num_draft_tokens=self.speculation.longest,
        )
        self.runner = Runner(model, self.config)
        self._token_s: float | None = None  # of a prompt, in a step of many
        self._mask_reuse, self._last_end_s = MaskReuse(), 0.0
        self.scheduler = self._new_scheduler()
        self._set_steps_per_dispatch(BURST_S)
        self.metrics = Metrics()
        self.ideal_decode_s: Callable[[int, float], float] | None = None

    def _new_blocks(self) -> BlockManager:
        return BlockManager(
            self.runner.windows,
            self.runner.num_blocks,
            accelerator.block_size(),
            prefix_caching=self.config.prefix_caching,
            state_rows=self.runner.state_rows,
        )

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(
            self._new_blocks(),
            self.config,
            limit_steps=self._limit_steps,
            worth_running=lambda *counts: self.runner.buckets.worth_running(*counts),
        )
        scheduler.token_budget = self._token_budget()
        return scheduler

    def _limit_steps(self, decodes: list[Sequence], most: int) -> int:
        """How many of at most so many decode steps a dispatch should run."""
        if any(s.sampler.num_candidates is not None for s in decodes):
            return 1  # the host chooses every token
        if all(s.sampler.constraint is None for s in decodes):
            return most
        if self.model.config.groups.state is not None:
            return 1  # a state does not go back where a token is discarded
        if self.runner.masks.exchanges:
            return most
        if jax.process_count() > 1:  # all must choose alike, and clocks differ
            return 1
        return self._mask_reuse.num_steps(decodes, most)

    def _token_budget(self) -> int:
        """What a step may run: all that is allowed, or what takes at most `step_s`."""
        if self.config.step_s is None:
            return self.config.max_tokens_per_step
        fitting = FIRST_BUDGET
        if self._token_s is not None and jax.process_count() == 1:
            fitting = int(self.config.step_s / self._token_s)
        least = max(
            self.config.max_num_seqs + SMALLEST_STEP, FEWEST_TIMED
        )  # so that steps are timed
        return min(max(fitting, least), self.config.max_tokens_per_step)

    def _time_tokens(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step what a token of a prompt takes, and how many a step may have."""
        if self.config.step_s is None or num_tokens < FEWEST_TIMED:
            return
        each = seconds / num_tokens
        self._token_s = each if self._token_s is None else (self._token_s + each) / 2
        self.scheduler.token_budget = self._token_budget()

    @property
    def kv_cache_bytes(self) -> int:
        return 0 if self.runner.cache is None else self.runner.cache.num_bytes

    def check(self, sequences: Seq[Sequence]) -> None:
        """Rejects what no step could run, and what could not run even alone; safe on any thread.

        Raises:
            RequestError: with the field, or the arithmetic.
        """
        for sequence in sequences:
            check_sequence(sequence, self.model.config.num_ids, self.config.max_model_len + 1)
            beams = len(sequence.schedule.siblings)
            if beams > 1:
                vocab_size = self.model.config.vocab_size
                check_beams(
                    sequence.params, sequence.stop_ids, vocab_size, self.config.max_num_seqs
                )
            if sequence.longest > self.config.max_model_len + 1:  # the last one is not run
                raise RequestError(
                    f"The request may come to hold {sequence.longest} tokens and the context holds "
                    f"{self.config.max_model_len}; lower max_tokens.",
                    param="max_tokens",
                )
            if not self.scheduler.can_ever_run(sequence):
                raise RequestError(
                    f"The request may come to hold {beams * sequence.longest} tokens, which the KV "
                    f"cache of {self.runner.num_blocks} blocks of "
                    f"{accelerator.block_size()} cannot; lower max_tokens.",
                    param="max_tokens",
                )

    def add(
        self,
        sequences: Seq[Sequence],
        arrival_s: float | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        """Queues sequences, with all siblings; they run as `step` is called.

        Args:
            arrival_s: when they came; None is now.
            is_checked: the caller's word that `check` accepted them.

        Raises:
            RequestError: one of them could not run even alone; none is queued.
        """
        if not is_checked:
            self.check(sequences)
        for sequence in with_siblings(sequences):
            is_free = sequence.params.structured_output is None
            assert is_free or sequence.sampler.constraint is not None
            sequence.times.arrival_s = time.perf_counter() if arrival_s is None else arrival_s
            self.scheduler.add(sequence)

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """Takes a sequence out with its siblings, wherever they are; one that has finished stays
        as it is.

        Args:
            reason: its finish_reason.
        """
        open_ = [sibling for sibling in sequence.schedule.siblings if not sibling.is_finished]
        self.scheduler.abort(sequence, reason)
        self._count_finished(open_, time.perf_counter())
        self._set_gauges()

    def _count_finished(self, sequences: list[Sequence], now_s: float) -> None:
        for sequence in sequences:
            if sequence.is_finished:
                self.metrics.finished(sequence, now_s)

    def warm_up(self, sequences: Seq[Sequence]) -> None:
        """Compiles everything these sequences will need."""
        self.warm_up_prefill(sequences)
        self.warm_up_decode()

    def warm_up_prefill(self, sequences: Seq[Sequence]) -> None:
        """Compiles what these sequences need up to their first tokens."""
        blocks = self.scheduler.blocks
        sequences = [sequence for sequence in sequences if not sequence.schedule.awaits_fork]
        self.runner.warm_up_prefill(sequences, [blocks.num_cached(s) for s in sequences])

    def warm_up_decode(self) -> None:
        """Compiles the rest of what the sequences of `warm_up_prefill` need."""
        self.runner.warm_up_decode()
        self.speculation.warm_up()

    @property
    def decodes_next(self) -> bool:
        """Whether the next step may run a sequence of which one token is left to run."""
        scheduler = self.scheduler
        return any(s.num_uncomputed_tokens == 1 for s in scheduler.running) or any(
            s.num_tokens - scheduler.blocks.num_cached(s) == 1 for s in scheduler.waiting
        )

    def warm_up_all(self, report: Callable[[Compiled], None] = lambda _: None) -> list[Compiled]:
        """Compiles everything that any request can need; what is missing then is an error.

        Returns:
            The warm-up report: every program, its seconds, and whether the persistent cache had it.
        """
        found = self.runner.warm_up_all(self.server_buckets(), report)
        return found + self.speculation.warm_up_all(report)

    def server_buckets(self) -> Buckets:
        """Shapes for any mixture of requests."""
        return Buckets.of_server(
            self.config.max_num_seqs,
            self.config.max_model_len,
            self.config.max_tokens_per_step,
            reads_in_place=self.runner.reads_in_place,
            pads=self.runner.pads,
            lookahead_tokens=self.runner.buckets.lookahead_tokens,
            lists=self.runner.num_data_shards,
        )

    def forget_all(self) -> list[Sequence]:
        """Lets go of every sequence that waits or runs, and says which."""
        lost = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler = self._new_scheduler()
        self._set_steps_per_dispatch(BURST_S)
        self._set_gauges()
        return lost

    def reset(self) -> None:
        """An empty cache, after a failure of the device; nobody may be running."""
        assert not self.has_unfinished
        self.runner.reset()
        self.speculation.reset()

    def temporary_bytes(self) -> int:
        """Device memory for intermediates of the largest program; 0 when nothing is jitted.

        Compiles again where no persistent cache keeps the programs.
        """
        analyses = [low.compile().memory_analysis() for _, low in self.runner.lowered()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[StepOutput]:
        """Runs one scheduled step; what each sequence got."""
        begun_s = time.perf_counter()
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            return self._run(step, begun_s)
        except Exception as error:
            if exhaustion.is_exhausted(error):
                raise EngineError(self._why_exhausted(error)) from error
            raise

    def _why_exhausted(self, error: Exception) -> str:
        held = {"kv_cache": self.kv_cache_bytes, "drafter": self.speculation.num_bytes}
        return exhaustion.sentence(error, self.model, self.config, **held)

    def _run(self, step: ScheduledStep, step_s: float) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        try:
            if step.copies:
                self.runner.copy(step.copies)
            start_s = time.perf_counter()
            drafts = self._drafts(step)
            calls = self.runner.calls(step, drafts)
        except BaseException as error:
            if not self._isolates(error):
                raise
            outputs += self._run_apart(step.sequences, error)
            self._start_again()
            return outputs
        if not drafts:
            start_s = time.perf_counter()
        for call in calls:
            try:
                if not self.runner.is_warm(call) and not self.runner.is_fully_warm:
                    start_s += self._warm_untimed(call)
                begun_s = time.perf_counter()
                result = self.runner.run(call, step.num_steps)
            except RowError as fault:  # of one row, before anything ran
                outputs += self._end_row(fault.sequence, fault.error)
                continue
            except BaseException as error:
                if not self._isolates(error):
                    raise
                outputs += self._run_apart(call.sequences, error)
                if self.runner.lost_state:
                    self._start_again()
                    break
                continue
            now_s = time.perf_counter()
            self._watch_call(call, result, now_s - start_s)
            self._set_steps_per_dispatch((now_s - start_s) / result.num_steps)
            self._count_call(call, result.num_steps, now_s - step_s)
            step_s = now_s
            if call.shape.kind is StepKind.DECODE:
                gap_s = begun_s - self._last_end_s
                self._mask_reuse.observe(gap_s, result.num_steps, now_s - begun_s)
            self._last_end_s = now_s
            if call.shape.kind is StepKind.STEP:
                self._time_tokens(sum(call.counts), now_s - start_s)
            outputs += self._take(call, result, now_s)
            start_s = now_s
        self.scheduler.finish_step(step)
        outputs += self._step_beams(step)
        self.metrics.step(step.num_tokens)
        self._set_gauges()
        return outputs

    def _count_call(self, call: Call, num_steps: int, seconds: float) -> None:
        shape, rows = call.shape, len(call.sequences)
        run = sum(call.counts) + sum(map(len, call.lookahead or ()))
        made_for = shape.tokens * (shape.sequences if shape.kind is StepKind.DENSE else 1)
        self.metrics.called(num_steps * run, num_steps * made_for, seconds / num_steps)
        if shape.kind in (StepKind.DECODE, StepKind.VERIFY) and self.ideal_decode_s is not None:
            context = sum(sequence.num_tokens for sequence in call.sequences) / rows
            self.metrics.decoded(seconds, num_steps * self.ideal_decode_s(rows, context))

    def _isolates(self, error: BaseException) -> bool:
        """Whether a fault ends its requests alone; a library's panic is no Exception."""
        return self.config.isolates_faults and not isinstance(error, KeyboardInterrupt | SystemExit)

    def _end_row(self, sequence: Sequence, error: BaseException) -> list[StepOutput]:
        """Ends the one sequence whose fault it was."""
        why = f"{FAILED}: {first_line(error)}"
        if isinstance(error, Exception) and exhaustion.is_exhausted(error):
            why = self._why_exhausted(error)
        return self._fail(sequence, why, time.perf_counter())

    def _fail(self, sequence: Sequence, why: str, now_s: float) -> list[StepOutput]:
        """Ends a sequence and its siblings with an error."""
        ended = [sibling for sibling in sequence.schedule.siblings if not sibling.is_finished]
        self.scheduler.fail(sequence, why)
        self._count_finished(ended, now_s)
        return [sibling.output_since(sibling.num_output_tokens) for sibling in ended]

    def _run_apart(self, sequences: list[Sequence], error: BaseException) -> list[StepOutput]:
        """After a call's fault that no sequence is known for: its sequences are requeued and run
        apart once, and those that fail again end."""
        outputs: list[StepOutput] = []
        for sequence in sequences:
            if sequence.schedule.is_suspect and not sequence.is_finished:
                outputs += self._end_row(sequence, error)
        self.scheduler.suspect([s for s in sequences if s.schedule.slot is not None])
        return outputs

    def _start_again(self) -> None:
        """With an empty cache, after a step that took it with it: everybody is computed again."""
        self.scheduler.forget_blocks(self._new_blocks())
        self.runner.reset()
        self.speculation.reset()

    def _warm_untimed(self, call: Call) -> float:
        """Compiles what a call needs, outside all timings; the seconds it took."""
        started = time.perf_counter()
        self.runner.warm(call)
        seconds = time.perf_counter() - started
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence.pause(seconds)
        return seconds

    def _drafts(self, step: ScheduledStep) -> list[list[int]]:
        """For each decode row, or none at all, as beside prompts and rows of which the host must
        see every token."""
        rows = step.decodes
        if step.prefills or any(s.sampler.needs_host for s in rows):
            return []
        try:
            return self.speculation.propose(rows, step.room - 1)
        except BaseException as error:
            if not self._isolates(error):
                raise
            self.speculation.reset()  # a drafter's fault costs drafts
            return []

    def _watch_call(self, call: Call, result: StepResult, seconds: float) -> None:
        """Tells the speculation what a call took, and what came of its drafts."""
        rows = len(call.sequences)
        if call.lookahead is None:
            if call.shape.kind is StepKind.DECODE:
                self.speculation.decoded(rows, result.num_steps, seconds)
            return
        num_accepted = 0
        for row, (sequence, draft) in enumerate(zip(call.sequences, call.lookahead, strict=True)):
            accepted = result.num_tokens(row) - 1
            sequence.num_draft_tokens += len(draft)
            sequence.num_accepted_tokens += accepted
            num_accepted += accepted
        num_drafts = sum(map(len, call.lookahead))
        self.speculation.verified(rows, num_drafts, num_accepted, seconds)
        self.metrics.num_draft_tokens += num_drafts
        self.metrics.num_accepted_tokens += num_accepted

    def _step_beams(self, step: ScheduledStep) -> list[StepOutput]:
        """Ends the searches of which a beam failed, and lets those go on of which all have run."""
        now_s, outputs = time.perf_counter(), []
        for sequence in step.sequences:
            if sequence.finish_reason == "error" and len(sequence.schedule.siblings) > 1:
                outputs += self._fail(sequence, sequence.error or FAILED, now_s)
        for group in advance(self.scheduler, now_s):
            self.metrics.token(group.members[0], now_s)
            ended = [member for member in group.members if member.is_finished]
            self._count_finished(ended, now_s)
            outputs += [member.output_since(0) for member in ended]
        return outputs

    def _set_steps_per_dispatch(self, step_s: float) -> None:
        """Chooses the steps of the next dispatch, if the caller did not.

        Args:
            step_s: of the last decode step, or of a prefill, which takes no less.
        """
        if self.config.options.decode_steps is None and self.config.options.use_cache:
            fitting = int(BURST_S / max(step_s, 1e-6))
            if jax.process_count() > 1:  # all must choose alike, and clocks differ
                fitting = self.config.decode_steps
            fitting = min(fitting, self.speculation.most_steps or fitting)
            self.scheduler.steps_per_dispatch = min(max(fitting, 1), self.config.decode_steps)

    def _take(self, call: Call, result: StepResult, now_s: float) -> list[StepOutput]:
        """Appends the tokens of a call, and ends the sequences that are done."""
        outputs = []
        for row, sequence in enumerate(call.sequences):
            if call.lookahead and call.lookahead[row] and not result.is_finite(0, row):
                self._start_over(sequence)
                continue
            if result.scores is not None:
                _take_scores(sequence, result, call.counts[row])
            if self.config.pooler is not None and result.vectors is not None:
                take_vector(self.config.pooler, sequence, result.vectors[row], call.counts[row])
            if call.lookahead and result.num_tokens(row) <= len(call.lookahead[row]):
                self.scheduler.blocks.keep_state(sequence, result.num_tokens(row))
            sequence.num_computed_tokens += call.counts[row]
            uncomputed, before = sequence.num_uncomputed_tokens, sequence.num_output_tokens
            sequence.sampler.num_uncounted = min(sequence.sampler.num_uncounted, uncomputed)
            sequence.sampler.num_discarded = 0
            if uncomputed == 0 or not result.is_finite(0, row):
                try:
                    self._take_tokens(sequence, result, row, now_s)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a library's panic is no Exception
                    sequence.finish("error", f"{FAILED}: {first_line(error)}")
                sequence.schedule.is_suspect = False
            if sequence.is_finished:
                self.metrics.finished(sequence, now_s)
            if sequence.is_finished or sequence.num_output_tokens > before:
                outputs.append(sequence.output_since(before))
        return outputs

    def _start_over(self, sequence: Sequence) -> None:
        """Without drafts, which may be what is not finite; their K and V must not stay."""
        self.speculation.leave_out(sequence)
        self.runner.clear(sequence)
        self.scheduler.preempt(sequence)

    def _take_tokens(self, sequence: Sequence, result: StepResult, row: int, now_s: float) -> None:
        params, sampler = sequence.params, sequence.sampler
        sent = sampler.constraint.mask if sampler.constraint and result.reuses_masks else None
        for index in range(result.num_tokens(row)):
            if not result.is_finite(index, row):
                sequence.finish("error", NOT_FINITE)
                self.runner.clear(sequence)
                return
            if result.vectors is not None:
                sequence.finish("stop")
                return
            if not result.is_allowed(index, row):
                sequence.finish("error", NOT_ALLOWED)
                return
            if index:
                sequence.num_computed_tokens += 1
            if sampler.num_candidates is not None:
                sequence.candidates = result.logprobs(index, row, sampler.num_candidates).top
                return
            if params.logprobs is not None:
                sampler.logprobs.append(result.logprobs(index, row, params.logprobs))
            self.metrics.token(sequence, now_s)
            sequence.append(result.token(index, row), now_s)
            if sequence.is_finished:
                return
            if sent is not None and not self._stays(sequence, sent):
                rest = range(index + 1, result.num_tokens(row))
                sampler.num_discarded = len(rest)  # they are run again
                if not all(result.is_finite(i, row) for i in rest):
                    self._start_over(sequence)
                break
        while sampler.constraint and (token := sequence.forced_token) is not None:
            # runs with the next step
            self.metrics.token(sequence, now_s)
            sequence.append(token, now_s)
            sampler.num_uncounted += 1

    def _stays(self, sequence: Sequence, sent: np.ndarray) -> bool:
        """Whether a constraint's mask is still the one that the steps ran with."""
        assert sequence.sampler.constraint is not None
        stays = np.array_equal(sequence.sampler.constraint.mask, sent)
        self._mask_reuse.watch(sequence, stays)
        return stays

    def _set_gauges(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        metrics.num_waiting, metrics.num_running = len(scheduler.waiting), len(scheduler.running)
        metrics.block_size = accelerator.block_size()
        metrics.blocks_used = scheduler.blocks.num_used
        metrics.blocks_total = [n - 1 for n in self.runner.num_blocks]
        metrics.num_preemptions = scheduler.num_preemptions


def _check_layers(model: AnyModel, config: EngineConfig) -> None:
    """
    Raises:
        EngineError: the model's layers are not as the options say; over stages they are always
            stacked, so that each device has its own.
    """
    options, mesh = config.options, config.mesh
    in_stages = mesh is not None and shards_of(mesh).stage > 1
    has = "stacked" if "stacked_layers" in model.weights else "unstacked"
    wants = "stacked" if options.layers == "scan" or in_stages else "unstacked"
    if has != wants:
        raise EngineError(
            f"The model has {has} layers and layers={options.layers!r} runs {wants} ones; use the "
            f"options that it was loaded with."
        )


def _take_scores(sequence: Sequence, result: StepResult, count: int) -> None:
    """Log-probabilities of prompt tokens; of the token after position p at p."""
    wanted = sequence.params.prompt_logprobs
    assert wanted is not None
    assert result.scores is not None
    for index in range(count):
        position = sequence.num_computed_tokens + index
        if len(sequence.sampler.prompt_logprobs) == position < sequence.num_prompt_tokens - 1:
            scores = unpack_logprobs(result.scores[index], wanted)
            sequence.sampler.prompt_logprobs.append(scores)
