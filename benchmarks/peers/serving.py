"""Requests that are served: all at once, then spread over time, engines in turns.

In every round of the first kind the parts of the ideal time are measured too, by processes of ours
that do nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import plan
from engine_process import EngineProcess, rounded, timed
from plan import AT_ONCE, OUR_WAYS, OURS, PARTS, SPREAD


@dataclass
class Column:
    """A peer, or one of our ways to serve."""

    name: str
    engine: EngineProcess
    trials: list[dict[str, Any]] = field(default_factory=list)


class Serving:
    """One model's figures.

    Args:
        what: is measured, for a reader.
        engines: ours, the peers, then one of ours for each of `plan.PARTS`.
        peers: names of those in the middle.
        problem: is told what could not be measured.

    Attributes:
        opened: what each server said when it was ready.
        parts: per round, the seconds of each part of the ideal time.
    """

    def __init__(
        self,
        what: str,
        engines: Sequence[EngineProcess],
        peers: Sequence[str],
        rounds: int,
        problem: Callable[[str], None],
    ):
        self.what, self.engines, self.rounds, self.problem = what, engines, rounds, problem
        self.servers = dict(zip((OURS, *peers), engines, strict=False))
        self.benches = dict(zip(PARTS, engines[len(self.servers) :], strict=True))
        self.opened: dict[str, dict[str, Any]] = {}
        self.parts: list[dict[str, float]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """Entries of the document.

        Raises:
            EngineFailed: an engine failed; what came before is whole.
        """
        job = plan.SERVING
        self.opened = {n: s.ask(do="open_serving", **job) for n, s in self.servers.items()}
        for name, job in PARTS.items():
            self.benches[name].ask(do="open", **vars(job))
        at_once = self._at_once()
        yield at_once
        if plan.SERVING_PEER not in self.servers:
            self.problem(f"{self.what}, {SPREAD} arrivals: their rate is {plan.SERVING_PEER}'s")
            return
        trials = at_once["engines"][plan.SERVING_PEER]["trials"]
        yield self._spread(plan.LOAD * capacity(trials))

    def _at_once(self) -> dict[str, Any]:
        arrivals, columns = [0.0] * plan.SERVING["requests"], self._columns(OUR_WAYS)
        for number in range(self.rounds):
            parts: dict[str, float] = {}
            turns = [partial(self._serve, column, arrivals) for column in columns]
            turns += [partial(self._part, name, parts) for name in PARTS]
            in_turn(turns, number)
            self.parts.append(rounded(parts))
        return self._entry(AT_ONCE, columns) | {"parts": self.parts}

    def _spread(self, rate: float) -> dict[str, Any]:
        columns = self._columns(OUR_WAYS[:1])
        for number in range(self.rounds):
            arrivals = plan.poisson(rate, plan.SERVING["requests"], seed=number)
            in_turn([partial(self._serve, column, arrivals) for column in columns], number)
        return self._entry(SPREAD, columns) | rounded({"rate": rate})

    def _columns(self, our_ways: Sequence[str]) -> list[Column]:
        ours = [Column(way, self.servers[OURS]) for way in our_ways]
        return ours + [Column(n, s) for n, s in self.servers.items() if n != OURS]

    def _serve(self, column: Column, arrivals: Sequence[float]) -> None:
        ask = partial(column.engine.ask, do="serve", by=column.name, arrivals=arrivals)
        column.trials.append(rounded(timed(column.engine, self.engines, ask)))

    def _part(self, name: str, into: dict[str, float]) -> None:
        engine = self.benches[name]
        found = timed(engine, self.engines, partial(engine.ask, do="trial"))
        into[name] = found[f"{name}_s"]

    def _entry(self, load: str, columns: Sequence[Column]) -> dict[str, Any]:
        tokens = plan.SERVING["requests"] * plan.SERVING["new_tokens"]
        speeds = [
            f"{c.name} {tokens / median(t['seconds'] for t in c.trials):.0f}" for c in columns
        ]
        sys.stderr.write(f"{self.what}, {load}: {', '.join(speeds)} tok/s\n")
        prompts = {"prompt_tokens": self.opened[OURS]["prompt_tokens"]}
        engines = {column.name: {"trials": column.trials} for column in columns}
        return {"load": load, **plan.SERVING, **prompts, "engines": engines}


def in_turn(turns: Sequence[Callable[[], None]], number: int) -> None:
    """One round; every other one in the opposite order."""
    for turn in turns if number % 2 == 0 else turns[::-1]:
        turn()


def capacity(trials: Sequence[dict[str, Any]]) -> float:
    """Requests a second, when all come at once."""
    return plan.SERVING["requests"] / median(trial["seconds"] for trial in trials)
