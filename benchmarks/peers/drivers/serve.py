"""What every driver shares: messages on stdin, answers on stdout, a JSON object a line.

    {"do": "open", "batch": 8, "prompt_tokens": 64, "new_tokens": 64}    -> whatever is known then
    {"do": "trial"}                                                      -> seconds of one run

The first line out says what the engine is. Standard library only: each driver runs in the Python of
its engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
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


class Engine(Protocol):
    """What a driver is."""

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
        if kind == "open":
            job = Job(**message)
            answer(lambda job=job: engine[0].open(job))
        else:
            answer(engine[0].trial)
