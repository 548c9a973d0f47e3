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
BRANCHES = re.compile(
    r"(?:true|false)_computation=%?([\w.\-]+)|branch_computations=\{([\w.\-, %]+)\}"
)


def launches(text: str, kind: str) -> Counter[str]:
    """What one step launches, by its kind, from the compiled program's HLO.

    Of a decode step, what the body and the condition of its loop run. What an inner loop runs is
    counted once, and of a conditional, the branch with the fewest.
    """
    computations = {}
    for part in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", text):
        if name := re.match(r"(ENTRY )?%?([\w.\-]+) \(", part):
            computations[name[2]] = part
            if name[1]:
                computations["ENTRY"] = part
    if kind != "decode":
        return _counted(computations, "ENTRY")
    loops = re.findall(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", text)
    condition, body = max(loops, key=lambda names: len(computations[names[1]]))
    return _counted(computations, body) + _counted(computations, condition)


def _counted(computations: dict[str, str], name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in computations[name].splitlines()[1:]:
        if not (operation := OPERATION.match(line)) or operation[1] in FREE:
            continue
        kind = operation[1]
        if kind in ("call", "while", "async-start"):
            for called in CALLED.findall(line):
                found += _counted(computations, called)
            continue
        if kind == "conditional":
            names = re.split(r"[,\s%]+", ",".join("".join(f) for f in BRANCHES.findall(line)))
            branches = [_counted(computations, name) for name in names if name in computations]
            found += min(branches, key=Counter.total)
        if kind.endswith("-done"):
            continue
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            kind = target[1]
        found[kind] += 1
    return found
