"""Measuring one workload in this process.

Load outside the clock; warm up until nothing compiles; then trials. Token ids in and out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rooflax.bench.ceilings import TERMS, Ceiling, ceiling_reader
from rooflax.bench.counting import StepCost, decode_cost, prefill_cost
from rooflax.bench.environment import machine_state
from rooflax.bench.figures import Summary, doubts
from rooflax.bench.timeline import Timeline
from rooflax.bench.trials import Trial, run_trials, warm_up
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.engine.sequence import Sequence
from rooflax.errors import EngineError, RequestError
from rooflax.input_processor import check_generates
from rooflax.llm import LLM
from rooflax.loading.model_info import model_info
from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes, peak_rss_bytes
from rooflax.nn.storage import Storage
from rooflax.ops.format_names import KNOWN, format_of
from rooflax.ops.kernels import ran


def multiplied_as(storage: Storage) -> str:
    """Kinds of numbers that most matmuls multiply, whose rate is the compute ceiling.

    Formats that round multiply their code by int8; weights that stay in bfloat16 meet float32, and
    others are upcast to the activations as they are read.
    """
    if format := KNOWN.get(format_of(storage.format)):
        return format.code if format.quantizes_activations else storage.dtype
    return TERMS if storage.keeps_bfloat16 else storage.dtype


def measure(work: Workload) -> dict[str, Any]:
    """One entry of `results` in `bench --json`, with what is doubtful in "warnings".

    Peaks are read before the first ceiling, whose buffer may be larger than the model.
    """
    if work.deterministic:
        jax.config.update("jax_default_matmul_precision", "highest")
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(()))())
    at_start = anonymous_bytes()
    with AnonymousPeak() as sampled, count_compilations() as compiled:
        bench = Bench(work)
        warm_ups = warm_up(bench.run)
    peaks = {"peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": device_peak()}
    trials, void, machine = timed_trials(bench)
    at_end = anonymous_bytes()
    check_output([t.timeline for t in trials], work, bench.llm)
    return {
        **bench.describe(),
        **figures(trials, work, bench.decode, bench.prefill),
        "warm_ups": warm_ups,
        "load_s": bench.llm.load_s,
        "compile_s": compiled.seconds,
        "compilations": compiled.compilations,
        "compilations_while_timed": sum(t.compilations for t in trials),
        "void_trials": len(void),
        "memory": {
            "anonymous_before_bytes": at_start,
            "anonymous_after_bytes": at_end,
            "anonymous_peak_bytes": sampled.peak,
            "temporary_bytes": bench.engine.temporary_bytes(),
        },
        **peaks,
        "machine": machine,
        "tokens": [list(row) for row in trials[0].timeline.tokens],
        "warnings": warnings_of(trials, void, **machine),
    }


class Bench:
    """A loaded model with an engine and prompts: a job that can be run again and again.

    Raises:
        RequestError: the context does not hold the work.
    """

    def __init__(self, work: Workload):
        info = model_info(work.model, **work.source)
        check_generates(info)
        self.work = work
        self.llm = LLM(
            info,
            **vars(work.precision),
            options=work.options,
            max_num_seqs=work.batch,
            mesh=work.mesh,
            lora=work.lora,
            prefix_caching=False,  # every trial computes its prompts
        )
        longest, room = work.prompt_tokens + work.output_tokens, self.llm.max_model_len
        if longest > room:
            raise RequestError(
                f"{work.prompt_tokens} prompt tokens and {work.output_tokens} new ones are "
                f"{longest}, and the context of {info.name} holds {room}"
            )
        self._prepare()

    def _prepare(self) -> None:
        """Prompts, an engine, and what a step reads and multiplies."""
        work, plan, config = self.work, self.llm.plan, self.llm.info.config
        self.prompts = work.prompts(config.vocab_size)
        self.engine = self.llm.engine_for(self._sequences())
        self.multiplied = multiplied_as(plan.storage)
        widths = {"storage": plan.storage, "kv_dtype": plan.kv_dtype, "batch": work.batch}
        middle = work.prompt_tokens + work.output_tokens // 2
        self.decode = decode_cost(config, context=middle, **widths)
        self.prefill = prefill_cost(config, prompt=work.prompt_tokens, **widths)

    def of_batch(self, batch: int) -> Bench:
        """The same with fewer prompts, over the same weights."""
        changed = copy(self)
        changed.work = replace(self.work, batch=batch)
        changed._prepare()
        return changed

    @property
    def num_devices(self) -> int:
        """Number of the mesh's devices; simulated ones are a single CPU."""
        simulated = jax.default_backend() == "cpu"
        return 1 if self.llm.mesh is None or simulated else self.llm.mesh.size

    def _sequences(self) -> list[Sequence]:
        params = self.work.params()
        return [
            Sequence(row, prompt, params, self.work.output_tokens, frozenset())
            for row, prompt in enumerate(self.prompts)
        ]

    def run(self) -> Timeline:
        """Runs every prompt to its end."""
        sequences = self._sequences()
        self.engine.warm_up(sequences)
        start = time.perf_counter()
        self.engine.add(sequences)
        while self.engine.has_unfinished:
            self.engine.step()
        return Timeline(
            start,
            [s.times.tokens_s for s in sequences],
            [tuple(s.output_tokens) for s in sequences],
        )

    def describe(self) -> dict[str, Any]:
        """Describes the run for a reader of the result."""
        work, llm = self.work, self.llm
        options = work.as_json()["options"]
        return {
            "model": llm.info.name,
            "format": self.llm.format,
            "parameters": llm.model.num_parameters,
            "batch": work.batch,
            "prompt_tokens": work.prompt_tokens,
            "output_tokens": work.output_tokens,
            "options": options,
            "layers": llm.options.layers,
            **kernels_that_ran(work.options.kernels),
            "precision": vars(llm.plan.precision),
            "deterministic": work.deterministic,
            **({"mesh": work.mesh} if work.mesh else {}),
            "weights_bytes": llm.model.weights_bytes,
            "kv_cache_bytes": self.engine.kv_cache_bytes,
        }


def kernels_that_ran(asked: str | None) -> dict[str, Any]:
    """Per operation the implementations that ran, and why better ones did not."""
    kernels: dict[str, str | None] = {}
    passed_over: dict[str, None] = {}
    for label, each in ran(asked).items():
        kernels[label] = ", ".join(dict.fromkeys(one.implementation for one in each)) or None
        for better, why in (pair for one in each for pair in one.passed_over):
            passed_over[f"{label}: {better} was passed over: {why}."] = None
    return {"kernels": kernels, "passed_over": list(passed_over)}


def timed_trials(bench: Bench) -> tuple[list[Trial], list[Trial], dict[str, Any]]:
    """(valid trials, void ones, the machine before and after); the ceilings' buffers are let go."""
    read = _of_all(ceiling_reader(bench.decode.total_bytes, bench.multiplied), bench.num_devices)
    before = machine_state()
    trials, void = run_trials(bench.run, read, bench.work.trials)
    return trials, void, {"before": before, "after": machine_state()}


def _of_all(read: Callable[[], Ceiling], num_devices: int) -> Callable[[], Ceiling]:
    """The ceilings of a mesh: of all its devices together."""

    def together() -> Ceiling:
        one = read()
        return replace(
            one,
            read_gb_per_s=one.read_gb_per_s * num_devices,
            flops_per_s=one.flops_per_s * num_devices,
        )

    return together


def check_output(timelines: list[Timeline], work: Workload, llm: LLM) -> None:
    """Rejects figures whose output is wrong.

    Raises:
        EngineError: a wrong number of tokens, NaN, or other tokens than the first trial's.
    """
    for timeline in timelines:
        if any(len(row) != work.output_tokens for row in timeline.tokens):
            raise EngineError("a trial gave another number of tokens than was asked for")
        if timeline.tokens != timelines[0].tokens:
            raise EngineError("two trials of the same work gave different tokens")
    if not np.isfinite(llm.score([list(timelines[0].tokens[0])])[0]).all():
        raise EngineError("the model's logits hold NaN or infinity")


def warnings_of(
    trials: list[Trial], void: list[Trial], before: dict[str, Any], after: dict[str, Any]
) -> list[str]:
    """Warnings about a measurement, one sentence each."""
    warnings = []
    if void:
        warnings.append(
            f"{len(void)} trials were void and taken again: something compiled while the clock ran"
        )
    speeds = {
        "prefill": [1 / t.timeline.ttft_s for t in trials],
        "decode": [t.timeline.decode_tok_per_s for t in trials],
    }
    noise = [f"{name}: {d}" for name, values in speeds.items() for d in doubts(Summary.of(values))]
    if noise:
        load, clock = (f"{before[k]} -> {after[k]}" for k in ("load_average", "clock_mhz"))
        noise.append(f"over the trials, load average {load}, clock {clock} MHz")
    return warnings + noise


def figures(
    trials: list[Trial], work: Workload, decode: StepCost, prefill: StepCost
) -> dict[str, Any]:
    """Speeds and shares."""
    lines = [t.timeline for t in trials]
    decode_s, prefill_s = [t.tpot_s for t in lines], [t.ttft_s for t in lines]
    return {
        "prefill_tok_per_s": _summary([t.prefill_tok_per_s(work.prompt_tokens) for t in lines]),
        "decode_tok_per_s": _summary([t.decode_tok_per_s for t in lines]),
        "ttft_s": _summary(prefill_s),
        "tpot_s": _summary(decode_s),
        "decode_roofline": median_share(trials, decode_s, decode),
        "prefill_roofline": median_share(trials, prefill_s, prefill),
        "decode_mbu": median_share(trials, decode_s, decode, "memory"),
        "decode_mfu": median_share(trials, decode_s, decode, "multiply"),
        "prefill_mbu": median_share(trials, prefill_s, prefill, "memory"),
        "prefill_mfu": median_share(trials, prefill_s, prefill, "multiply"),
        "decode_bound": bound_of(trials, decode),
        "prefill_bound": bound_of(trials, prefill),
        "ceilings": [{"before": vars(t.before), "after": vars(t.after)} for t in trials],
        "decode_step": vars(decode) | {"total_bytes": decode.total_bytes},
        "prefill_step": vars(prefill) | {"total_bytes": prefill.total_bytes},
    }


def _summary(values: list[float]) -> dict[str, object]:
    return Summary.of(values).as_json()


def median_share(
    trials: list[Trial], seconds: list[float], cost: StepCost, of: str | None = None
) -> float:
    """Median over trials of (time the ceilings allow) / (time it took).

    Args:
        of: "memory", whose share is MBU, or "multiply", MFU; None is what takes longer.
    """
    pairs = zip(trials, seconds, strict=True)
    return float(np.median([share_of_roofline(cost, t.before, t.after, s, of) for t, s in pairs]))


def share_of_roofline(
    cost: StepCost, before: Ceiling, after: Ceiling, seconds: float, of: str | None = None
) -> float:
    """Reading or multiplying at the ceiling, or the longer of both, over the time taken."""
    least = least_seconds(cost, before, after)
    return (max(least.values()) if of is None else least[of]) / seconds


def least_seconds(cost: StepCost, before: Ceiling, after: Ceiling) -> dict[str, float]:
    """Least seconds of reading at the memory's ceiling and of multiplying at its own."""
    read = (before.read_gb_per_s + after.read_gb_per_s) / 2 * 1e9
    multiply = (before.flops_per_s + after.flops_per_s) / 2
    return {"memory": cost.total_bytes / read, "multiply": cost.operations / multiply}


def bound_of(trials: list[Trial], cost: StepCost) -> str:
    """The ceiling that a step meets first: "memory" or "multiply", by the trials' medians."""
    times = [least_seconds(cost, t.before, t.after) for t in trials]
    median = {name: float(np.median([each[name] for each in times])) for name in times[0]}
    return max(median, key=lambda name: median[name])


def device_peak() -> int | None:
    """Peak bytes in use on the device, if it reports them."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
