"""What a compiled program launches on a GPU, from its HLO."""

from __future__ import annotations

import re
from collections import Counter

FREE = {
    "parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all", "partition-id",
}  # fmt: skip
"""Operations that launch nothing."""
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\])}] ([a-z][\w\-]*)\(", re.M)
CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
BRANCHES = (
    re.compile(r"false_computation=%?([\w.\-]+)"),
    re.compile(r"true_computation=%?([\w.\-]+)"),
    re.compile(r"branch_computations=\{([\w.\-, %]+)\}"),
)
"""Of a conditional, the one first that runs where its condition does not hold."""


def launches(text: str, kind: str, asked: bool = False) -> Counter[str]:
    """What one step launches, by its kind, from the compiled program's HLO.

    Of a decode step, what the body and the condition of its loop run. What an inner loop runs is
    counted once. Of a conditional, what runs where its condition does not hold: conditions say what
    requests ask for.

    Args:
        asked: counts the branch with the most launches instead.
    """
    computations = {}
    for part in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", text):
        if name := re.match(r"(ENTRY )?%?([\w.\-]+) \(", part):
            computations[name[2]] = part
            if name[1]:
                computations["ENTRY"] = part
    if kind != "decode":
        return _counted(computations, "ENTRY", asked)
    loops = re.findall(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", text)
    condition, body = max(loops, key=lambda names: len(computations[names[1]]))
    return _counted(computations, body, asked) + _counted(computations, condition, asked)


def _counted(computations: dict[str, str], name: str, asked: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in computations[name].splitlines()[1:]:
        if not (operation := OPERATION.match(line)) or operation[1] in FREE:
            continue
        kind = operation[1]
        if kind in ("call", "while", "async-start"):
            for called in CALLED.findall(line):
                found += _counted(computations, called, asked)
            continue
        if kind == "conditional":
            branches = [_counted(computations, name, asked) for name in _branches(line)]
            found += max(branches, key=Counter.total) if asked else branches[0]
        if kind.endswith("-done"):
            continue
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            kind = target[1]
        found[kind] += 1
    return found


def _branches(line: str) -> list[str]:
    """Names of a conditional's computations."""
    found = [names for pattern in BRANCHES for names in pattern.findall(line)]
    return re.split(r"[,\s%]+", ",".join(found).lstrip("%"))
