"""`Engine`: token ids in, token ids out.

It knows requests, sequences and steps. It knows no text, no files and no chat.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import jax

from rooflax.engine import exhaustion
from rooflax.engine.block_manager import BlockManager
from rooflax.engine.buckets import Buckets, Shape, StepKind
from rooflax.engine.features.feature import CallTimes, Feature
from rooflax.engine.features.registry import FEATURES
from rooflax.engine.features.speculation import Speculation
from rooflax.engine.lockstep import Lockstep
from rooflax.engine.metrics import Metrics
from rooflax.engine.packing import StepResult, unpack_logprobs
from rooflax.engine.request_checks import check_sequence
from rooflax.engine.runner import Compiled, Runner, StepCall
from rooflax.engine.scheduler import Scheduler, StepPlan
from rooflax.engine.sequence import (
    NOT_ALLOWED,
    NOT_FINITE,
    RowError,
    Sequence,
    StepOutput,
    with_siblings,
)
from rooflax.engine.step_budget import StepBudget
from rooflax.errors import EngineError, RequestError, first_line
from rooflax.models.offloading import AnyModel
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.mesh import shards_of
from rooflax.ops import accelerator

FAILED = "The request failed at work"


class Engine:
    """Runs requests to their end, `config.max_num_seqs` at a time.

    Args:
        model: with stacked layers exactly when options.layers is "scan"; any other pair is an
            EngineError.
        config: what it leaves open becomes what this model needs.
        speculation: the drafter; None drafts nothing.
        features: what else the engine can do.
        lockstep: with other processes, which repeat its device calls.

    Attributes:
        features: one of each, the speculation first.
    """

    def __init__(
        self,
        model: AnyModel,
        config: EngineConfig,
        speculation: Speculation | None = None,
        features: Seq[type[Feature]] = FEATURES,
        lockstep: Lockstep | None = None,
    ):
        _check_layers(model, config)
        assert speculation is None or config.options.use_cache
        self.model = model
        self.features = [speculation] if speculation else []
        self.features += [feature() for feature in features if feature.is_for(config)]
        self._states = {feature.state for feature in self.features}
        self.has_own_clock = lockstep is not None or jax.process_count() == 1
        self.config = config.fitted(
            is_causal=model.config.is_causal,
            prefill_chunk=accelerator.prefill_chunk(),
            num_draft_tokens=max((f.num_lookahead_tokens for f in self.features), default=0),
        )
        self.runner = Runner(model, self.config, lockstep, **self._step_function())
        self.step_budget = StepBudget(self.config, has_own_clock=self.has_own_clock)
        self.scheduler = self._new_scheduler()
        self.metrics = Metrics(block_size=accelerator.block_size())
        for feature in self.features:
            # No cycle: weights would stay in memory until the garbage collector comes by.
            feature.core = weakref.proxy(self)
        self.ideal_decode_s: Callable[[int, float], float] | None = None

    def _step_function(self) -> dict[str, Any]:
        functions = [feature.step_function(self.config) for feature in self.features]
        function = next(filter(None, functions), {})
        if self.config.pooler is not None and not function:
            raise EngineError("The model pools, and the engine was made without pooling.")
        return function

    def _new_blocks(self) -> BlockManager:
        return BlockManager(
            self.runner.windows,
            self.runner.num_blocks,
            accelerator.block_size(),
            prefix_caching=self.config.prefix_caching,
            state_rows=self.runner.state_rows,
        )

    def _new_scheduler(self) -> Scheduler:
        features, runner = self.features, self.runner  # not the engine, which holds the scheduler

        def limit_steps(decodes: list[Sequence], most: int) -> int:
            for feature in features:
                most = feature.limit_steps(decodes, most)
            return most

        scheduler = Scheduler(
            self._new_blocks(),
            self.config,
            limit_steps=limit_steps,
            worth_running=lambda *counts: runner.buckets.worth_running(*counts),
        )
        self.step_budget.start(scheduler)
        return scheduler

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
            missing = next((s.feature for s in sequence.features if s not in self._states), None)
            if missing is not None:
                raise RequestError(
                    f"The request needs {missing}, and the engine was made without it."
                )
            for feature in self.features:
                feature.check(sequence, self.model.config.vocab_size, self.config.max_num_seqs)
            if sequence.longest > self.config.max_model_len + 1:  # the last one is not run
                raise RequestError(
                    f"The request may come to hold {sequence.longest} tokens and the context holds "
                    f"{self.config.max_model_len}; lower max_tokens.",
                    param="max_tokens",
                )
            if not self.scheduler.can_ever_run(sequence):
                longest = len(sequence.schedule.siblings) * sequence.longest
                raise RequestError(
                    f"The request may come to hold {longest} tokens, which the KV "
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
        self.metrics.finished_all(open_, time.perf_counter())
        self._set_gauges()

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
        for feature in self.features:
            feature.warm_up(lambda _: None)

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
        compiled = self.runner.warm_up_all(self.server_buckets(), report)
        for feature in self.features:
            compiled += feature.warm_up(report)
        return compiled

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

    def use(self, model: AnyModel) -> None:
        """Runs other weights of the same shapes from now on; what is cached of the old ones goes.

        No sequence may be running.
        """
        self.model = self.runner.model = model
        self.forget_all()

    def forget_all(self) -> None:
        """Lets go of every sequence that waits or runs."""
        self.scheduler = self._new_scheduler()
        self._set_gauges()

    def reset(self) -> None:
        """An empty cache, after a failure of the device; no sequence may have blocks."""
        self.runner.reset()
        for feature in self.features:
            feature.reset()

    def temporary_bytes(self) -> int:
        """Device memory for intermediates of the largest program; 0 when nothing is jitted.

        Compiles again where no persistent cache keeps the programs.
        """
        analyses = [low.compile().memory_analysis() for _, low in self.runner.lowered()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    def end(self, failure: str | None) -> None:
        """Lets the processes that repeat its device calls end, with an error where it failed."""
        if self.runner.lockstep is not None:
            self.runner.lockstep.end(failure)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[StepOutput]:
        """Runs one scheduled step; what each sequence got."""
        begun_s = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            return []
        try:
            return self._run(plan, begun_s)
        except Exception as error:
            if exhaustion.is_exhausted(error):
                raise EngineError(self._why_exhausted(error)) from error
            raise

    def _why_exhausted(self, error: Exception) -> str:
        held = {"kv_cache": self.kv_cache_bytes, "drafter": sum(f.num_bytes for f in self.features)}
        return exhaustion.sentence(error, self.model, self.config, **held)

    def _run(self, plan: StepPlan, step_s: float) -> list[StepOutput]:
        """Runs the device calls of a plan, each followed by its features and tokens; a fault of a
        call ends no more than its own sequences, where the engine isolates faults."""
        outputs: list[StepOutput] = []
        try:
            if plan.copies:
                self.runner.copy(plan.copies)
            start_s = time.perf_counter()
            for feature in self.features:
                plan = feature.before_step(plan)
            calls = self.runner.calls(plan)
        except BaseException as error:
            if not self.isolates(error):
                raise
            outputs += self._run_apart(plan.sequences, error)
            self._start_again()
            return outputs
        if not plan.lookahead:
            start_s = time.perf_counter()
        for call in calls:
            try:
                if not self.runner.is_warm(call.shape) and not self.runner.is_fully_warm:
                    start_s += self._warm_untimed(call.shape)
                begun_s = time.perf_counter()
                result = self.runner.run(call, plan.num_steps)
            except RowError as fault:  # of one row, before anything ran
                outputs += self._end_row(fault.sequence, fault.error)
                continue
            except BaseException as error:
                if not self.isolates(error):
                    raise
                outputs += self._run_apart(call.sequences, error)
                if self.runner.lost_state:
                    self._start_again()
                    break
                continue
            times = CallTimes(step_s, start_s, begun_s, time.perf_counter())
            outputs += self._apply(call, result, times)
            step_s = start_s = times.ended_s
        self.scheduler.finish_step(plan)
        for feature in self.features:
            outputs += feature.after_step(plan)
        self.metrics.step(plan.num_tokens)
        self._set_gauges()
        return outputs

    def _count_call(self, call: StepCall, num_steps: int, seconds: float) -> None:
        shape, rows = call.shape, len(call.sequences)
        run = sum(call.counts) + sum(map(len, call.lookahead or ()))
        made_for = shape.tokens * (shape.sequences if shape.kind is StepKind.DENSE else 1)
        self.metrics.called(num_steps * run, num_steps * made_for, seconds / num_steps)
        if shape.kind in (StepKind.DECODE, StepKind.VERIFY) and self.ideal_decode_s is not None:
            context = sum(sequence.num_tokens for sequence in call.sequences) / rows
            self.metrics.decoded(seconds, num_steps * self.ideal_decode_s(rows, context))

    def isolates(self, error: BaseException) -> bool:
        """Whether a fault ends its requests alone; a library's panic is no Exception."""
        return self.config.isolates_faults and not isinstance(error, KeyboardInterrupt | SystemExit)

    def _end_row(self, sequence: Sequence, error: BaseException) -> list[StepOutput]:
        """Ends the one sequence whose fault it was."""
        why = f"{FAILED}: {first_line(error)}"
        if isinstance(error, Exception) and exhaustion.is_exhausted(error):
            why = self._why_exhausted(error)
        return self.fail(sequence, why, time.perf_counter())

    def fail(self, sequence: Sequence, why: str, now_s: float) -> list[StepOutput]:
        """Ends a sequence and its siblings with an error."""
        ended = [sibling for sibling in sequence.schedule.siblings if not sibling.is_finished]
        self.scheduler.abort(sequence, "error", why)
        self.metrics.finished_all(ended, now_s)
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
        """Restarts with an empty cache after a step destroyed it: every sequence is recomputed."""
        self.scheduler.forget_blocks(self._new_blocks())
        self.reset()

    def restart(self, sequence: Sequence) -> None:
        """Requeues a sequence whose K and V must not stay: they may be what is not finite."""
        self.runner.clear(sequence)
        self.scheduler.preempt(sequence)

    def _warm_untimed(self, shape: Shape) -> float:
        """Compiles a shape, outside all timings; the seconds it took."""
        started = time.perf_counter()
        self.runner.warm(shape)
        seconds = time.perf_counter() - started
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence.pause(seconds)
        return seconds

    def _apply(self, call: StepCall, result: StepResult, times: CallTimes) -> list[StepOutput]:
        """Appends the tokens of a call, and ends the sequences that are done."""
        outputs, now_s = [], times.ended_s
        self.step_budget.after_call(
            self.scheduler, call, result.num_steps, now_s - times.prepared_s
        )
        self._count_call(call, result.num_steps, now_s - times.scheduled_s)
        for feature in self.features:
            feature.after_call(call, result, times)
        for row, (sequence, count) in enumerate(zip(call.sequences, call.counts, strict=True)):
            if sequence.schedule.slot is None:
                continue  # a feature restarted it
            if result.scores is not None:
                _take_scores(sequence, result, count)
            sequence.num_computed_tokens += count
            uncomputed, before = sequence.num_uncomputed_tokens, sequence.num_output_tokens
            sampler = sequence.sampler
            sampler.num_uncounted = min(sampler.num_uncounted, uncomputed)
            sampler.num_discarded = 0
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

    def _take_tokens(self, sequence: Sequence, result: StepResult, row: int, now_s: float) -> None:
        params, sampler = sequence.params, sequence.sampler
        for index in range(result.num_tokens(row)):
            if not result.is_finite(index, row):
                sequence.finish("error", NOT_FINITE)
                self.runner.clear(sequence)
                return
            if sequence.is_finished:  # by a feature
                return
            if not result.is_allowed(index, row):
                sequence.finish("error", NOT_ALLOWED)
                return
            if index:
                sequence.num_computed_tokens += 1
            if sampler.num_candidates is not None:
                sampler.candidates = result.logprobs(index, row, sampler.num_candidates).top
                return
            if params.logprobs is not None:
                sampler.logprobs.append(result.logprobs(index, row, params.logprobs))
            stands = self._append(sequence, result.token(index, row), now_s, result)
            if sequence.is_finished:
                return
            if not stands:
                rest = range(index + 1, result.num_tokens(row))
                sampler.num_discarded = len(rest)  # they are run again
                if not all(result.is_finite(i, row) for i in rest):
                    self.restart(sequence)
                break
        if sequence.features:
            for feature in self.features:
                while (token := feature.forced_token(sequence)) is not None:
                    self._append(sequence, token, now_s, None)
                    sampler.num_uncounted += 1

    def _append(
        self, sequence: Sequence, token: int, now_s: float, result: StepResult | None
    ) -> bool:
        """Appends a token; whether those that its call computed after it count."""
        self.metrics.token(sequence, now_s)
        sequence.append(token, now_s)
        if not sequence.features:
            return True
        stands = True
        for feature in self.features:
            stands &= feature.after_token(sequence, result)
        return stands

    def _set_gauges(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        metrics.num_waiting, metrics.num_running = len(scheduler.waiting), len(scheduler.running)
        metrics.adapters_waiting = _adapters(scheduler.waiting)
        metrics.adapters_running = _adapters(scheduler.running)
        metrics.blocks_used = scheduler.blocks.num_used
        metrics.blocks_total = [n - 1 for n in self.runner.num_blocks]
        metrics.num_preemptions = scheduler.num_preemptions


def _adapters(sequences: Iterable[Sequence]) -> list[int]:
    return sorted({one.kv.adapter for one in sequences} - {0})


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
