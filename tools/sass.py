"""Machine code of a GPU kernel, as nvdisasm prints it: its loops, their instructions, and whether
products are waited for before the memory they read is filled again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*)")
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
            elif (line := LINE.search(line)) and line[2] != "NOP":
                found.append(Instruction(line[2], line[3].split(";")[0].strip()))
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

    def hot_loop(self) -> tuple[Instruction, ...]:
        """The innermost loop that multiplies most."""
        loops = self.loops()
        # a wait that is written behind the end jumps back, too
        loops = [a for a in loops if all(i.kind != "EXIT" for i in self.instructions[a[0] : a[1]])]
        inner = [
            a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)
        ]

        def multiplies(loop: tuple[int, int]) -> int:
            body = self.instructions[loop[0] : loop[1] + 1]
            return sum(i.kind in ("IDP", "FFMA", "FMUL", "HGMMA") for i in body)

        if not inner:
            return ()
        begin, end = max(inner, key=multiplies)
        return self.instructions[begin : end + 1]

    def counts(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.instructions)

    def unawaited_refills(self) -> int:
        """Copies to shared memory in a loop that has products, with no wait for products between
        the last of these and the copy. Behind the wait all warps must meet, because one of them
        copies.
        """
        missing = 0
        for begin, end in self.loops():
            body = self.instructions[begin : end + 1]
            if not any(i.kind == "HGMMA" for i in body):
                continue
            state = "none"  # what has happened since the last product
            for instruction in body * 2:
                if instruction.kind == "HGMMA":
                    state = "multiplied"
                elif _waits_for_products(instruction) and state == "multiplied":
                    state = "waited"
                elif instruction.kind == "BAR" and state == "waited":
                    state = "met"
                elif instruction.kind == "UTMALDG" and state in ("multiplied", "waited"):
                    missing += 1
        return missing


def _waits_for_products(instruction: Instruction) -> bool:
    return instruction.name.startswith("WARPGROUP.DEPBAR")


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
