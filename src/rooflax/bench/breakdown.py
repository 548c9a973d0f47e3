"""Breakdown of a step's time by operation, from a profiler trace of one run.

A trace names the instruction behind each event; the compiled program says which part of the model
an instruction came from (`ops.parts`). What no instruction fills is dispatch: Python, transfers and
waiting.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rooflax.bench.measure import Bench
from rooflax.bench.trials import warm_up
from rooflax.bench.workload import Workload
from rooflax.errors import EngineError, RequestError
from rooflax.ops.parts import PARTS

OTHER, DISPATCH = "other", "dispatch"
CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")
"""Their time is that of the instructions inside, which have events of their own."""
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?P<opcode>[\w\-]+)\(")
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class TraceEvent(NamedTuple):
    """One instruction that ran: its program, its name, when."""

    module: str
    instruction: str
    start_ns: float
    end_ns: float


def breakdown(work: Workload, folder: str | None = None) -> dict[str, Any]:
    """Shares of the time of prefill and of decode, for one profiled run.

    Args:
        folder: where the trace stays, to be opened with xprof or Perfetto; None keeps none.

    Raises:
        RequestError: nothing is compiled.
        EngineError: the trace holds nothing of the programs that ran.
    """
    if not work.options.jit:
        raise RequestError("a breakdown reads compiled programs, and `jit` is off; leave it on")
    # A kept program bears the names it was first compiled with, and they are not in its key.
    jax.config.update("jax_enable_compilation_cache", False)
    bench = Bench(work)
    warm_up(bench.run)
    parts: dict[str, dict[str, str | None]] = {}
    for name, text in _programs(bench):
        merge_parts(parts.setdefault(name, {}), instruction_parts(text))
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or temporary
        with jax.profiler.trace(where):
            timeline = bench.run()
        events = list(_events(_newest_trace(Path(where))))
    table = {f"{module}/{n}": part for module, named in parts.items() for n, part in named.items()}
    mine = [
        event._replace(instruction=f"{event.module}/{event.instruction}")
        for event in events
        if event.module in parts
    ]
    begin_ns = min((event.start_ns for event in mine), default=0.0)
    first, rest = split(mine, begin_ns + 1e9 * timeline.ttft_s)
    phases = {
        phase: {"seconds": seconds, "shares": shares(run, table, seconds)}
        for phase, run, seconds in (
            ("prefill", first, timeline.ttft_s),
            ("decode", rest, timeline.decode_s),
        )
    }
    return {**bench.describe(), "phases": phases, "tokens": list(map(list, timeline.tokens))}


def _programs(bench: Bench) -> Iterator[tuple[str, str]]:
    for name, lowered in bench.engine.runner.lowered():
        text = lowered.compile().as_text()
        module = _MODULE.match(text or "")
        if text is None or module is None:
            raise EngineError(f"the compiled program of {name} cannot be read here")
        yield module[1], text


def split(events: list[TraceEvent], at_ns: float) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Events that begin before a time, and the others."""
    return (
        [event for event in events if event.start_ns < at_ns],
        [event for event in events if event.start_ns >= at_ns],
    )


def merge_parts(into: dict[str, str | None], other: dict[str, str | None]) -> None:
    """Adds another program of the same name; an instruction they place differently is "other"."""
    for name, part in other.items():
        into[name] = part if into.get(name, part) == part else OTHER


def instruction_parts(program: str) -> dict[str, str | None]:
    """The part that each instruction of a compiled program belongs to; None for containers.

    XLA forgets where a matmul came from when it reshapes its operands; attention's are batched
    and keep their names, so a nameless one is a weight's.
    """
    part_of: dict[str, str | None] = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name = _OP_NAME.search(line)
        path = name.group(1).split("/") if name else []
        nameless = "matmuls" if match["opcode"] == "dot" and name is None else OTHER
        inside = [piece for piece in path if piece in PARTS]
        if inside[:1] in (["matmuls"], ["experts"]) and "norms" in inside:  # a matmul's prologue
            inside = ["norms"]
        part = inside[0] if inside else nameless
        part_of[match["name"]] = None if match["opcode"] in CONTAINERS else part
    return part_of


def shares(
    events: list[TraceEvent], parts: dict[str, str | None], seconds: float
) -> dict[str, float]:
    """Share of `seconds` per part; they sum to 1.

    Instructions of several threads overlap: together they get the time in which any of them ran,
    divided by their own durations.

    Raises:
        EngineError: no event belongs to a known instruction.
    """
    leaves = [e for e in events if parts.get(e.instruction) is not None]
    spent: dict[str, float] = dict.fromkeys((*PARTS, OTHER), 0.0)
    for event in leaves:
        spent[parts[event.instruction] or OTHER] += event.end_ns - event.start_ns
    total = sum(spent.values())
    if total == 0:
        raise EngineError("the trace holds no event of the programs that ran")
    busy = min(1.0, covered((e.start_ns, e.end_ns) for e in leaves) / 1e9 / seconds)
    share_of = {part: busy * time / total for part, time in spent.items()}
    return share_of | {DISPATCH: 1.0 - busy}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _newest_trace(folder: Path) -> Path:
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise EngineError(f"the profiler wrote no trace to {folder}")
    return traces[-1]


def _events(trace: Path) -> Iterator[TraceEvent]:
    """Every event of a trace that names an instruction."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    module = str(stats.get("hlo_module", ""))
                    end = event.start_ns + event.duration_ns
                    yield TraceEvent(module, str(stats["hlo_op"]), event.start_ns, end)
