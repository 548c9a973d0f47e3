"""What every driver shares: messages on stdin, answers on stdout, a JSON object a line.

    {"do": "open", "batch": 8, "prompt_tokens": 64, "new_tokens": 64}    -> whatever is known then
    {"do": "trial"}                                                      -> seconds of one run
    {"do": "open_serving", "requests": 32, "new_tokens": 64, "slots": 16}
    {"do": "serve", "by": "AsyncLLM", "arrivals": [0.0, ...]}            -> what its callers saw

The first line out says what the engine is. The last two are for engines that serve, and `by`
chooses where an engine has several ways to. Standard library only: each driver runs in the Python
of its engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THREADS_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A shape of work: `batch` prompts, then `new_tokens` decode steps after the first token."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompt(self, row: int, vocab_size: int = 50000) -> list[int]:
        """Ids that any tokenizer has; every row has its own."""
        return [(row * 101 + i * 7 + 3) % vocab_size for i in range(self.prompt_tokens)]


@dataclass(frozen=True)
class ServingJob:
    """Requests of unequal prompts, `new_tokens` for each, `slots` of them at a time."""

    requests: int
    new_tokens: int
    slots: int

    def prompts(self, run: int, vocab_size: int = 50000) -> list[list[int]]:
        """48 to 87 ids each. No two of a process begin alike: no run finds another's in a cache."""
        return [
            [(i * 7 + 3 + k * 11 + run * 401) % vocab_size for i in range(48 + (k * 13) % 40)]
            for k in range(self.requests)
        ]


def seen(
    job: ServingJob, arrivals: Sequence[float], times: Sequence[Sequence[float]]
) -> dict[str, float]:
    """What the callers of a run saw.

    Args:
        arrivals: when each request came, in seconds of the run.
        times: when each of its tokens came back.

    Raises:
        ValueError: a request has another number of tokens than was asked for.
    """
    if len(times) != job.requests or any(len(row) != job.new_tokens for row in times):
        raise ValueError(f"{[len(row) for row in times]} tokens came, not {job.new_tokens} each")
    waits = sorted(row[0] - came for came, row in zip(arrivals, times, strict=True))
    gaps = [after - before for row in times for before, after in itertools.pairwise(row)]
    return {
        "seconds": max(row[-1] for row in times) - min(arrivals),
        "ttft_p50_s": quantile(waits, 0.50),
        "ttft_p99_s": quantile(waits, 0.99),
        "longest_gap_s": max(gaps, default=0.0),
    }


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest of sorted values that is not below `part` of them; of 32, p99 is the largest."""
    return values[math.ceil(part * len(values)) - 1]


class Engine(Protocol):
    """What a driver is. One that serves has `open_serving(job)` and `serve(by, arrivals)` too."""

    def about(self) -> dict[str, Any]:
        """Versions and settings, for the head of a report."""
        ...

    def open(self, job: Job) -> dict[str, Any]:
        """Gets ready for a job, outside the clock."""
        ...

    def trial(self) -> dict[str, Any]:
        """Runs the job: `prefill_s` to the first token, `decode_s` from there to the end."""
        ...


def arguments(description: str | None) -> argparse.Namespace:
    """MODEL FORMAT --threads N; the number of threads is in the environment, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("format")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for name in THREADS_VARIABLES:
        os.environ[name] = str(args.threads)
    return args


def clock(prefill: Callable[[], Any], decode: Callable[[], Any]) -> dict[str, float]:
    """The two parts of a trial, timed."""
    start = time.perf_counter()
    prefill()
    first = time.perf_counter()
    decode()
    return {"prefill_s": first - start, "decode_s": time.perf_counter() - first}


def serve(make: Callable[[], Engine]) -> None:
    """Answers until stdin ends. What a library prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(function: Callable[[], dict[str, Any]]) -> None:
        try:
            found = function()
        except Exception as error:
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        out.write(json.dumps(found) + "\n")

    engine: list[Engine] = []

    def start() -> dict[str, Any]:
        engine.append(make())
        return engine[0].about()

    answer(start)
    if not engine:
        sys.exit(1)
    for line in sys.stdin:
        message = json.loads(line)
        kind = message.pop("do")
        answer(lambda kind=kind, message=message: done(engine[0], kind, message))


def done(engine: Any, kind: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message's answer."""
    if kind == "open":
        return engine.open(Job(**message))
    if kind == "open_serving":
        return engine.open_serving(ServingJob(**message))
    return engine.serve(**message) if kind == "serve" else engine.trial()
