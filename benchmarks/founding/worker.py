"""One measurement in a process of its own: a job as JSON on stdin, its figures on stdout.

Nothing is kept between processes: the persistent compile cache is off, so a first run compiles all
that it needs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np

import rooflax
from benchmarks.founding import loops
from rooflax.bench.ceilings import Ceiling, ceiling_reader
from rooflax.bench.environment import environment, machine_state
from rooflax.bench.measure import Bench, check_output, median_share
from rooflax.bench.statistics import Summary
from rooflax.bench.trials import Job, ReadCeiling, Trial, run_trials, warm_up
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import CompileCounts, count_compilations

NO_CEILING = Ceiling(0.0, 0.0, "none")


def cell(work: Workload) -> dict[str, Any]:
    """The product's engine: its first run, which compiles, and its warm trials."""
    bench = Bench(work)
    read = ceiling_reader(bench.decode.total_bytes, bench.multiplied)
    found, trials = _cold_and_warm(bench.run, work, read)
    lines = [trial.timeline for trial in trials]
    if work.options.jit:  # eager rows have the tokens of a jitted one, which is checked
        check_output(lines, work, bench.llm)
    share = median_share(trials, [line.tpot_s for line in lines], bench.decode)
    return found | {"decode_roofline": share, "load_s": bench.llm.load_s}


def loop(work: Workload, name: str, short: int | None = None) -> dict[str, Any]:
    """One of `loops`: its first run and its warm trials.

    Args:
        short: tokens of a warm-up that is too short; the run right after it is what someone
            would have reported, and is given as "trap".
    """
    start = time.perf_counter()
    model = jax.block_until_ready(rooflax.load(work.model, dtype="float32"))
    load_s = time.perf_counter() - start
    prompt = work.prompts(model.config.vocab_size)[0]
    run = loops.make(name, model, work.options)
    if short is None:
        found, _ = _cold_and_warm(partial(run, prompt, work.output_tokens), work)
        return found | {"load_s": load_s}
    with count_compilations() as all_compiled:
        run(prompt, short)
        with count_compilations() as compiled:
            line = run(prompt, work.output_tokens)
    trap = {
        "warm_up_tokens": short,
        "tok_per_s": _speed(line),
        "compilations_while_timed": compiled.requests,
        "compile_s": compiled.seconds,
    }
    found, _ = _cold_and_warm(partial(run, prompt, work.output_tokens), work)
    cold = {"compilations": all_compiled.requests, "compile_s": all_compiled.seconds}
    return found | {"trap": trap, "cold": cold, "load_s": load_s}


def request(work: Workload) -> dict[str, Any]:
    """The first request of a fresh process, as a user makes it: compilation is in its time."""
    llm = rooflax.LLM(work.model, dtype=work.precision.dtype, options=work.options)
    prompts = work.prompts(llm.info.config.vocab_size)
    with count_compilations() as compiled:
        start = time.perf_counter()
        done = llm.generate(prompts, work.params())
        seconds = time.perf_counter() - start
    return {
        "cold": _cold(compiled, seconds),
        "tokens": [list(one.tokens) for one in done],
        "load_s": llm.load_s,
    }


def compile_step(work: Workload) -> dict[str, Any]:
    """Tracing and compiling one decode step, with layers as the options say."""
    model = rooflax.load(work.model, dtype="float32")
    model = model.stacked() if work.options.layers == "scan" else model
    cache = rooflax.new_cache(model, max_tokens=256, options=work.options)
    step = jax.jit(partial(rooflax.decode_step, options=work.options), donate_argnames="cache")
    start = time.perf_counter()
    lowered = step.lower(model, cache, np.zeros(1, np.int32), np.full(1, 4, np.int32))
    traced = time.perf_counter()
    lowered.compile()
    return {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}


def memory(work: Workload, tokens: int) -> dict[str, Any]:
    """Bytes of the weights and of a cache for one sequence, as they lie on the device."""
    dtype = work.precision.dtype or "float32"
    model = rooflax.load(work.model, dtype=dtype, quantize=work.precision.quantize)
    cache = rooflax.new_cache(model, max_tokens=tokens, dtype=dtype)
    return {"weights_bytes": model.weights_bytes, "kv_cache_bytes": cache.num_bytes}


def quantised(work: Workload) -> dict[str, Any]:
    """A cell whose format this machine may not have; then why it is refused."""
    try:
        return cell(work)
    except rooflax.RooflaxError as error:
        return {"refused": str(error)}


def about(work: Workload) -> dict[str, Any]:
    """Hardware and versions."""
    return environment()


def _cold_and_warm(
    job: Job, work: Workload, read: ReadCeiling = lambda: NO_CEILING
) -> tuple[dict[str, Any], list[Trial]]:
    """The job's first run, warm-up until nothing compiles, and its trials."""
    with count_compilations() as compiled:
        start = time.perf_counter()
        job()
        cold_s = time.perf_counter() - start
    warm_up(job)
    trials, void = run_trials(job, read, work.trials)
    lines = [trial.timeline for trial in trials]
    found = {
        "cold": _cold(compiled, cold_s),
        "tok_per_s": Summary.of([_speed(line) for line in lines]).as_json(),
        "ttft_s": Summary.of([line.ttft_s for line in lines]).as_json(),
        "decode_tok_per_s": Summary.of([line.decode_tok_per_s for line in lines]).as_json(),
        "void_trials": len(void),
        "tokens": [list(row) for row in lines[0].tokens],
        "same_in_all_trials": all(line.tokens == lines[0].tokens for line in lines),
        "machine": machine_state(),
    }
    return found, trials


def _cold(compiled: CompileCounts, seconds: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "compilations": compiled.requests,
        "compile_s": compiled.seconds,
    }


def _speed(line: Any) -> float:
    """All tokens over the time from the request to the last, as the founding documents do."""
    return len(line.tokens[0]) / (line.ttft_s + line.decode_s)


JOBS = {job.__name__: job for job in (cell, loop, request, compile_step, memory, quantised, about)}


def main(name: str) -> None:
    """Runs a job; whatever it prints goes to stderr."""
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(()))())  # the device is there
        found = JOBS[name](Workload.from_json(given["work"]), **given["arguments"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
