"""Runs a Mosaic GPU kernel's lowered module, and finds accesses of shared memory that nothing
orders.

Interpretation runs every copy and product to its end before the next operation, so that it cannot
see a copy that overwrites what a product still reads. Here warps run the module with integers only:
addresses, loops, barriers and waits. Each has a vector clock, and barriers join clocks. An access
ends where a wait says so: a product at the wait for its group, a copy with the phase of its
barrier. Of two accesses of the same bytes, one of which writes, the end of one must be known to the
warp that begins the other. That holds for every order in which warps may run, not only for the one
that ran.

One thread of each warp runs, of the first block. Where a product reads a part of a stage, all of it
counts as read.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from tests.support.ops.mosaic_modules import Memref, Op, bytes_of
from tests.support.ops.mosaic_values import GLOBAL, PRIVATE, Elected, at, value_of

WARP, WARPGROUP = 32, 128
ALIGNED = 128
"""Bytes that the addresses of copies to shared memory are multiples of."""
Clock = dict[Any, int]
Steps = Generator[None, None, Any]
"""Of a warp: it gives way where it waits."""


@dataclass(eq=False)
class Access:
    """Of shared memory.

    Attributes:
        what: "copy" to it, "product", "load", "store" or "copy out".
        begin: what its warp knew.
        end: a time of a clock from which on it is over; None is never.
        fenced: of a store, the same, for what copies and products read.
    """

    what: str
    start: int
    stop: int
    begin: Clock
    end: tuple[Any, int] | None = None
    fenced: tuple[Any, int] | None = None

    def before(self, other: Access) -> bool:
        """Whether it is known to be over where the other begins."""
        direct = self.what != "store" or other.what in ("store", "load")
        end = self.end if direct else self.fenced
        return end is not None and other.begin.get(end[0], 0) >= end[1]


@dataclass(eq=False)
class Barrier:
    """Of shared memory.

    Attributes:
        count: threads that arrive in a phase.
        pending: those that this one waits for.
        bytes: that this one waits for, of copies.
        clock: what those knew that arrived in this one.
        phases: the same, of those that are over.
    """

    count: int
    pending: int
    bytes: int = 0
    clock: Clock = field(default_factory=dict)
    phases: list[Clock] = field(default_factory=list)

    def happens(self, clock: Clock, threads: int, bytes: int) -> None:
        _join(self.clock, clock)
        self.pending -= threads
        self.bytes += bytes
        if self.pending == 0 and self.bytes == 0:
            self.phases.append(self.clock)
            self.clock, self.pending = {}, self.count


@dataclass(eq=False)
class Warp:
    """What one knows, and has of its own.

    Attributes:
        waited: phases of each barrier.
        announced: bytes of the next copy that each barrier waits for.
        open, groups: accesses that are not over, before and behind the end of their group.
        stores: that no fence has followed.
    """

    number: int
    clock: Clock = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    allocated: int = PRIVATE
    waited: Clock = field(default_factory=lambda: defaultdict(int))
    announced: Clock = field(default_factory=lambda: defaultdict(int))
    open: dict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[str, list[list[Access]]] = field(default_factory=lambda: defaultdict(list))
    stores: list[Access] = field(default_factory=list)

    def tick(self) -> tuple[int, int]:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.number, self.clock[self.number]


def _join(clock: Clock, other: Clock) -> None:
    for key, time in other.items():
        clock[key] = max(clock.get(key, 0), time)


class Run:
    """A kernel's run.

    Attributes:
        wrong: a line for each kind of pair that nothing orders, and for waits without an end.
        accesses: of shared memory.
        barriers: by address.
        filled: those of copies.
        awaited: those that some warp waits for.

    Args:
        module: the kernel.
        known: numbers that an argument of the kernel holds, by its place; others hold zeros.
        without: what is left out: "products" (their waits), "arrive", "meet" (of a warpgroup),
            "fence", "copies out" (their waits), and barriers (waits for them).
    """

    def __init__(self, module: list[Op], known: dict[int, int], without: Any = ()) -> None:
        self.known, self.without = known, without
        self.wrong: set[str] = set()
        self.accesses: list[Access] = []
        self.barriers: dict[int, Barrier] = {}
        self.filled: set[int] = set()
        self.awaited: set[int] = set()
        self.views: dict[int, int] = {}
        self.stages: dict[tuple[int, int], tuple[int, int]] = {}
        self.meetings: dict[Any, list[Warp]] = {}
        self.block = [1, 1, 1]
        for _ in self.steps(module, {}, Warp(0)):
            raise AssertionError("something waits before the kernel runs")
        self.wrong |= {f"nothing orders a {a} and a {b}" for a, b in self._unordered()}

    def launch(self, body: list[Op], values: dict[int, Any], block: list[int]) -> None:
        """All warps of a block, in turns."""
        self.block = block
        warps = [Warp(number) for number in range(math.prod(block) // WARP)]
        running = [self.steps(body, dict(values), warp) for warp in warps]
        before = None
        while running:
            running = [each for each in running if next(each, running) is None]
            now = len(running), [dict(warp.clock) for warp in warps]
            if running and now == before:
                self.wrong.add("warps wait for ever")
                return
            before = now
        known: Clock = {}
        for warp in warps:
            _join(known, warp.clock)
        for a in self.accesses:
            if a.end is None or known.get(a.end[0], 0) < a.end[1]:
                self.wrong.add(f"nothing waits for a {a.what}")

    @property
    def refilled(self) -> bool:
        """Whether a copy follows another to the same place."""
        places = [a.start for a in self.accesses if a.what == "copy"]
        return len(places) > len(set(places))

    def steps(self, ops: list[Op], values: dict[int, Any], warp: Warp) -> Steps:
        """What a warp does; gives what the last operation yields."""
        for op in ops:
            given = [values.get(v) for v in op.operands]
            if op.name in ("scf.yield", "scf.condition"):
                return given
            if op.name == "gpu.launch":
                sizes = [n for n, kind in zip(given, op.types, strict=True) if kind == "index"]
                self.launch(op.regions[0][1], values, sizes[3:6])
            elif op.regions:
                found = yield from self.region(op, given, values, warp)
                values.update((number, v) for (number, _), v in zip(op.results, found, strict=True))
            elif event := event_of(op.name):
                found = getattr(self, event)(op, given, warp)
                if isinstance(found, Generator):
                    yield from found
                elif op.results:
                    values[op.results[0][0]] = found
            elif op.results:
                found = value_of(op, given, self.block, WARP * warp.number)
                values.update((n, v) for (n, _), v in zip(op.results, found, strict=False))
        return []

    def region(self, op: Op, given: list[Any], values: dict[int, Any], warp: Warp) -> Steps:
        def run(place: int, *arguments: Any) -> Steps:
            numbers, ops = op.regions[place]
            values.update(zip(numbers, arguments, strict=True))
            return self.steps(ops, values, warp)

        if op.name == "scf.index_switch":
            assert given[0] is not None, "a branch hangs on what is not computed"
            cases = op.attributes["cases"]
            return (yield from run(1 + cases.index(given[0]) if given[0] in cases else 0))
        if op.name == "scf.for":
            begin, end, by, *carried = given
            for index in range(begin, end, by):
                carried = yield from run(0, index, *carried)
            return carried
        assert op.name == "scf.while", op.name
        while True:
            again, *given = yield from run(0, *given)
            if not again:
                return given
            given = yield from run(1, *given)

    def allocate(self, op: Op, given: list[Any], warp: Warp) -> Any:
        warp.allocated += 1 << 16
        return at(op.results[0][1], warp.allocated)

    def view(self, op: Op, given: list[Any], warp: Warp) -> Any:
        """Of shared memory."""
        found = value_of(op, given, self.block, 0)[0]
        if isinstance(found, Memref):
            self.views[found.base] = math.prod(found.shape) * found.each
        return found

    def load(self, op: Op, given: list[Any], warp: Warp) -> Any:
        place, each = _address(given), bytes_of(str(op.results[0][1]))
        if place is None or place >= GLOBAL:
            return self.known.get(place // GLOBAL - 1, 0) if place else None
        if place >= PRIVATE:
            return warp.memory.get(place)
        self.touch("load", place, each, warp).end = warp.tick()
        return None

    def store(self, op: Op, given: list[Any], warp: Warp) -> None:
        """A value, and where; of `stmatrix`, where first."""
        where = given[:1] if "stmatrix" in op.name else given[1:]
        place = _address(where)
        if place is None or place >= GLOBAL:
            return
        if place >= PRIVATE:
            warp.memory[place] = given[0]
            return
        access = self.touch("store", place, bytes_of(op.types[0]), warp)
        access.end = warp.tick()
        warp.stores.append(access)

    def touch(self, what: str, start: int, size: int, warp: Warp) -> Access:
        access = Access(what, start, start + size, dict(warp.clock))
        self.accesses.append(access)
        return access

    def fence(self, op: Op, given: list[Any], warp: Warp) -> None:
        if "fence" not in self.without:
            for access in warp.stores:
                access.fenced = warp.tick()
        warp.stores = []

    def initialise(self, op: Op, given: list[Any], warp: Warp) -> None:
        if all(op.of_type("i1", given)) and warp.number == 0:
            self.barriers[given[0]] = Barrier(given[1], given[1])

    def announce(self, op: Op, given: list[Any], warp: Warp) -> None:
        """Arrives, and says what a copy brings: each thread a part, or one of them all of it."""
        place, size = given[:2]
        alone = isinstance(size, Elected)
        warp.announced[place] += size if alone else size * WARPGROUP
        self.filled.add(place)
        warp.tick()
        self.barriers[place].happens(warp.clock, WARP, size if alone else size * WARP)

    def arrive(self, op: Op, given: list[Any], warp: Warp) -> None:
        if "arrive" not in self.without:
            warp.tick()
            self.barriers[given[0]].happens(warp.clock, WARP, 0)

    def wait(self, op: Op, given: list[Any], warp: Warp) -> Steps:
        """For a phase of this parity."""
        place, parity = given[:2]
        self.awaited.add(place)
        if place in self.without:
            return
        phases = self.barriers[place].phases
        while len(phases) % 2 == parity:
            yield
        if phases:
            if len(phases) - 1 != warp.waited[place]:
                self.wrong.add("a barrier goes on without one that waits")
            warp.waited[place] = len(phases)
            _join(warp.clock, phases[-1])
        warp.tick()

    def meet(self, op: Op, given: list[Any], warp: Warp) -> Steps:
        """Threads that wait for each other: the whole block, or as many as are said."""
        of = re.search(r"bar\.sync \$0, (\d+)", op.name)
        if of and "meet" in self.without:
            return
        wanted = int(of[1]) // WARP if of else math.prod(self.block) // WARP
        key = given[0] if of else "block"
        here = self.meetings.setdefault(key, [])
        here.append(warp)
        warp.tick()
        if len(here) == wanted:
            del self.meetings[key]
            known: Clock = {}
            for each in here:
                _join(known, each.clock)
            for each in here:
                _join(each.clock, known)
        while len(here) < wanted:
            yield

    def copy(self, op: Op, given: list[Any], warp: Warp) -> None:
        """To shared memory."""
        if not all(op.of_type("i1", given)):
            return
        place, barrier = op.of_type("!llvm.ptr<3>", given)
        size = warp.announced.pop(barrier)
        access = self.touch("copy", place, size, warp)
        if place % ALIGNED:
            self.wrong.add("a copy goes where TMA does not copy to")
        access.end = access, 1
        stage = max(start for start in self.views if start <= place), barrier
        start, stop = self.stages.get(stage, (access.start, access.stop))
        self.stages[stage] = min(start, access.start), max(stop, access.stop)
        warp.tick()
        self.barriers[barrier].happens({access: 1}, 0, -size)

    def copy_out(self, op: Op, given: list[Any], warp: Warp) -> None:
        if all(op.of_type("i1", given)):
            (place,) = op.of_type("!llvm.ptr<3>", given)
            warp.open["copies out"].append(self.touch("copy out", place, 1, warp))

    def multiply(self, op: Op, given: list[Any], warp: Warp) -> None:
        for descriptor in op.of_type("i64", given):
            place = (descriptor & 0x3FFF) << 4
            warp.open["products"].append(self.touch("product", place, 1, warp))

    def commit(self, op: Op, given: list[Any], warp: Warp) -> None:
        what = "products" if "wgmma" in op.name else "copies out"
        warp.groups[what].append(warp.open.pop(what, []))
        warp.tick()

    def wait_for_groups(self, op: Op, given: list[Any], warp: Warp) -> None:
        """All but the last ones, as many as are said."""
        what = "products" if "wgmma" in op.name else "copies out"
        said = re.search(r"wait_group\S* (\d+)", op.name)
        left = int(said[1]) if said else op.attributes["group"]
        now = warp.tick()
        while what not in self.without and len(warp.groups[what]) > left:
            for access in warp.groups[what].pop(0):
                access.end = now

    def _unordered(self) -> set[tuple[str, str]]:
        """Kinds of pairs."""
        stages = [*self.stages.values(), *((at, at + n) for at, n in self.views.items())]
        for a in self.accesses:
            if a.what in ("product", "copy out"):
                place = a.start
                a.start, a.stop = next(s for s in stages if s[0] <= place < s[1])
        found: set[tuple[str, str]] = set()
        for a in self.accesses:
            for b in self.accesses if a.what in ("copy", "store") else ():
                pair = a.what, b.what
                if pair in found or a is b or b.stop <= a.start or a.stop <= b.start:
                    continue
                if not a.before(b) and not b.before(a):
                    found.add(pair)
        return found


EVENTS = (
    ("mbarrier.arrive.expect_tx", "announce"),
    ("mbarrier.arrive", "arrive"),
    ("mbarrier.try_wait", "wait"),
    ("mbarrier.init", "initialise"),
    ("bar.sync", "meet"),
    ("gpu.barrier", "meet"),
    ("wgmma.mma_async", "multiply"),
    ("wgmma.commit_group", "commit"),
    ("bulk.commit.group", "commit"),
    ("wait_group", "wait_for_groups"),
    ("bulk.tensor.global", "copy_out"),
    ("cp.async.bulk.tensor", "copy"),
    ("fence.proxy", "fence"),
    ("memref.alloca", "allocate"),
    ("memref.view", "view"),
    (".load", "load"),
    (".store", "store"),
    ("nvvm.stmatrix", "store"),
)
"""What an operation's name says, and what it does here; the first that fits."""


@functools.cache
def event_of(name: str) -> str | None:
    return next((event for said, event in EVENTS if said in name), None)


def _address(given: list[Any]) -> int | None:
    """Of a reference and an index, or of a pointer."""
    where, *index = given
    if isinstance(where, Memref):
        return None if None in index else where.address(index)
    return where
