"""Machine code of a GPU kernel, as nvdisasm prints it: its loops, their instructions, and whether
these wait: for copies before they read, and for what has read before a copy fills it again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*)")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
TARGET = re.compile(r"\(?(\.L_x_\d+)\)?")


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order, and where its labels are."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @staticmethod
    def parsed(text: str) -> Code:
        found: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(found)
            elif (line := LINE.search(line)) and line[3] != "NOP" and line[2] != "!PT":
                found.append(Instruction(line[3], line[4].split(";")[0].strip()))
        return Code(tuple(found), labels)

    def target(self, instruction: Instruction) -> int | None:
        """Where a branch goes, if it is one within the kernel."""
        if instruction.kind != "BRA" or not (found := TARGET.search(instruction.operands)):
            return None
        return self.labels.get(found[1])

    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of each, by branches backwards; an instruction that branches
        to itself is the end of a kernel. Waits for barriers, of a few instructions, are none."""
        found = []
        for at, instruction in enumerate(self.instructions):
            begin = self.target(instruction)
            if begin is not None and begin < at and at - begin > 8:
                found.append((begin, at))
        return found

    def inner_loops(self) -> list[tuple[Instruction, ...]]:
        """Those without another in them."""
        # a wait that is written behind the end jumps back, too
        loops = [
            a for a in self.loops() if all(i.kind != "EXIT" for i in self.instructions[a[0] : a[1]])
        ]
        inner = [
            a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)
        ]
        return [self.instructions[begin : end + 1] for begin, end in inner]

    def hot_loop(self) -> tuple[Instruction, ...]:
        """The innermost loop that multiplies most."""

        def multiplies(body: tuple[Instruction, ...]) -> int:
            return sum(i.kind in ("IDP", "FFMA", "FMUL", "HGMMA") for i in body)

        return max(self.inner_loops(), key=multiplies, default=())

    def counts(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.instructions)

    def filling_loops(self) -> list[tuple[Instruction, ...]]:
        """Innermost loops that copy to shared memory what their products read."""
        kinds = {"HGMMA", "UTMALDG"}
        return [body for body in self.inner_loops() if kinds <= {i.kind for i in body}]

    def unawaited(self) -> int:
        """Copies and reads in these loops that may overtake what they have to wait for."""
        return sum(unawaited(body) for body in self.filling_loops())

    def overlooked(self) -> list[str]:
        """What these loops wait by, and without which `unawaited` finds no more; "a loop" where a
        kernel copies behind a product and has none."""
        kinds = [i.kind for i in self.instructions]
        behind = kinds[kinds.index("HGMMA") :] if "HGMMA" in kinds else []
        found = ["a loop"] if "UTMALDG" in behind and not self.filling_loops() else []
        for body in self.filling_loops():
            found += [what for what, less in _mutants(body) if unawaited(less) <= unawaited(body)]
        return found


def unawaited(body: tuple[Instruction, ...]) -> int:
    """Of one loop, by the order of its instructions; their addresses are not looked at.

    Between a copy and the next read, by a product or a load, is a wait for a barrier. Between a
    read and the next copy are a wait for products and then: with several warpgroups, an arrival at
    a barrier and the wait for it; with one, a meeting of its warps, since one of them copies.
    Products of one group may be under way: which stage they read is not looked at, either.
    """
    several, missing = _several(body), 0
    landed, done = True, "free"  # copies; what happened since the last read
    for i in body * 2:
        if i.kind == "UTMALDG":
            missing, landed = missing + (done != "free"), False
        elif i.kind == "HGMMA" or i.name.startswith("LDS"):
            missing += not landed
            done = "read" if i.kind == "HGMMA" or done == "read" else "waited"
        elif _waits_for_products(i):
            done = "waited" if done == "read" else done
        elif _arrives(i):
            done = "arrived" if several and done == "waited" else done
        elif _waits_for_barrier(i):
            landed, done = True, "free" if done == "arrived" else done
        elif i.kind == "BAR":
            done = "free" if not several and done == "waited" else done
    return missing


def _several(body: tuple[Instruction, ...]) -> bool:
    """Whether a program has several warpgroups: the number of a barrier is then computed."""
    return any(i.kind == "BAR" and i.operands.startswith("R") for i in body)


def _waits_for_products(i: Instruction) -> bool:
    """For all of them but the last group, or for all."""
    return i.name.startswith("WARPGROUP.DEPBAR") and int(i.operands.split()[-1], 16) <= 1


def _waits_for_barrier(i: Instruction) -> bool:
    return i.name.startswith("SYNCS.PHASECHK") and i.name.endswith("TRYWAIT")


def _arrives(i: Instruction) -> bool:
    """At a barrier, with no copy to announce."""
    return i.name.startswith("SYNCS.ARRIVE") and i.name.endswith("A1T0")


def _mutants(
    body: tuple[Instruction, ...],
) -> Iterator[tuple[str, tuple[Instruction, ...]]]:
    """A loop without something that it needs, and what that is."""
    meets = _arrives if _several(body) else lambda i: i.kind == "BAR"
    for what, is_it in (("products", _waits_for_products), ("free", meets)):
        yield what, tuple(i for i in body if not is_it(i))
    for at, i in enumerate(body):
        if _waits_for_barrier(i):
            yield "barrier", body[:at] + body[at + 1 :]


def per_weight(code: Code, weights: int, products: int) -> float | None:
    """Instructions of the hot loop for each weight that a thread multiplies.

    Args:
        weights: of a thread in one turn of the loop, as it is written.
        products: instructions that multiply in one turn; a compiler may unroll it.
    """
    body = code.hot_loop()
    counted = Counter(i.kind for i in body)
    if not body:
        return None
    multiplied = counted["HGMMA"] or counted["IDP"] or counted["FFMA"] + counted["FMUL"]
    turns = max(1, round(multiplied / products))
    return len(body) / (weights * turns)
