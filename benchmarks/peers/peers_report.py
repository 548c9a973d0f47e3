"""The rows of a comparison, from its trials alone, and the page that shows them."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import Any

import plan
from plan import OURS, PEERS

from rooflax.bench.ceilings import Ceiling
from rooflax.bench.counting import StepCost
from rooflax.bench.measure import share_of_roofline
from rooflax.bench.statistics import MIN_PAIRS, Summary, paired_ratio

SHAPE = ("batch", "prompt_tokens", "new_tokens")
HEADER = (
    "test", "width", OURS, *PEERS, "to the best peer", "roofline", "best peer's", "target", "met",
)  # fmt: skip
BEST_HEADER = ("model", "test", OURS, "best peer", "ratio", "target", "met")


def with_rows(document: dict[str, Any]) -> dict[str, Any]:
    """The document with `rows` and `best_prefill` computed anew from `jobs`."""
    rows = [row(job, test) for job in document["jobs"] for test in shape(job).tests]
    return document | {"rows": rows, "best_prefill": best_prefill(rows)}


def shape(job: dict[str, Any]) -> plan.Job:
    return plan.Job(**{name: job[name] for name in SHAPE})


def row(job: dict[str, Any], test: str) -> dict[str, Any]:
    """Speeds, ratio, shares and verdict of one test of a job."""
    tokens = job["batch"] * job["new_tokens" if test == "decode" else "prompt_tokens"]
    steps = job["new_tokens"] if test == "decode" else 1
    cost = StepCost(**job["engines"][OURS]["opened"]["costs"][test])
    engines = {}
    for name, found in job["engines"].items():
        seconds = [trial[f"{test}_s"] for trial in found["trials"]]
        engines[name] = {
            "format": found["format"],
            "tok_per_s": Summary.of([tokens / s for s in seconds]).as_json(),
            "roofline": median(
                share(cost, trial, s / steps)
                for trial, s in zip(found["trials"], seconds, strict=True)
            ),
        }
    head = {name: job[name] for name in ("model", "width", "batch", "prompt_tokens")}
    return {"test": test, **head, "engines": engines, **against_best(test, head, engines)}


def share(cost: StepCost, trial: dict[str, Any], seconds: float) -> float:
    """Of the roofline that was read around a trial."""
    before, after = (Ceiling(**trial[side]) for side in ("before", "after"))
    return share_of_roofline(cost, before, after, seconds)


def against_best(
    test: str, head: dict[str, Any], engines: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The fastest peer, our ratio to it with an interval where trials suffice, and the target."""
    ours, peers = engines[OURS], [name for name in engines if name != OURS]
    best = max(peers, key=lambda name: speed(engines[name]), default=None)
    ratio = interval = peer_share = None
    if best is not None:
        ratio, peer_share = speed(ours) / speed(engines[best]), engines[best]["roofline"]
        pairs = [engines[name]["tok_per_s"]["trials"] for name in (best, OURS)]
        if len(pairs[0]) == len(pairs[1]) >= MIN_PAIRS:
            interval = paired_ratio(*pairs).as_json()
    verdict = plan.Verdict()
    if test == "decode":
        width, batch = head["width"], head["batch"]
        verdict = plan.decode_verdict(width, batch, ratio, ours["roofline"], peer_share)
    return {"best_peer": best, "ratio": ratio, "interval": interval, **vars(verdict)}


def speed(found: dict[str, Any]) -> float:
    """Median tokens per second."""
    return found["tok_per_s"]["median"]


def best_prefill(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and shape, each side's fastest width."""
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for found in rows:
        if found["test"] == "prefill":
            key = (found["model"], found["batch"], found["prompt_tokens"])
            groups.setdefault(key, []).append(found)
    return [_best(key, group) for key, group in groups.items()]


def _best(key: tuple[str, int, int], group: list[dict[str, Any]]) -> dict[str, Any]:
    sides: dict[bool, list[list[Any]]] = {True: [], False: []}
    for found in group:
        for name, engine in found["engines"].items():
            sides[name == OURS].append([speed(engine), name, engine["format"]])
    ours, peer = max(sides[True]), max(sides[False], default=None)
    ratio = None if peer is None else ours[0] / peer[0]
    return {
        **dict(zip(("model", "batch", "prompt_tokens"), key, strict=True)),
        "ours": ours,
        "best_peer": peer,
        "ratio": ratio,
        "target": f">= {plan.PREFILL_RATIO}x",
        "met": None if ratio is None else ratio >= plan.PREFILL_RATIO,
    }


def rendered(document: dict[str, Any]) -> str:
    """The page; a function of the document alone."""
    parts = ["# rooflax beside its peers", *introduction(document)]
    for model in dict.fromkeys(found["model"] for found in document["rows"]):
        rows = [found for found in document["rows"] if found["model"] == model]
        parts += [f"## {model}", table(HEADER, [cells(found) for found in rows])]
    if document["best_prefill"]:
        lines = [best_cells(found) for found in document["best_prefill"]]
        parts += ["## Prefill, the best width of each", table(BEST_HEADER, lines)]
    short = short_of_target(document)
    parts += ["## What falls short", short or "Nothing that has a target."]
    if document["problems"]:
        parts += ["## What could not be measured", bullets(document["problems"])]
    return "\n\n".join(parts) + "\n"


def introduction(document: dict[str, Any]) -> list[str]:
    at, settings = document["environment"], document["settings"]
    steps = max((job["new_tokens"] for job in document["jobs"]), default=0)
    after = document["machine_after"]["load_average"]
    batches = ",".join(str(n) for n in settings.get("batches", ()))
    command = "benchmarks/peers/compare.py" + " --quick" * settings["quick"]
    for flag, part in settings.get("only", {}).items():
        command += f" --{flag} {','.join(part)}"
    command += f" --batches {batches} --rounds {settings['rounds']}" * bool(batches)
    reads = [
        trial[side]["read_gb_per_s"]
        for job in document["jobs"]
        for engine in job["engines"].values()
        for trial in engine["trials"]
        for side in ("before", "after")
    ]
    between = f"between {min(reads):.0f} and {max(reads):.0f} GB/s, " if reads else ""
    versions = [f"{name} {version(about)}" for name, about in document["engines"].items()]
    facts = [
        (
            f"{at['cpu']}, {settings['threads']} threads, load average {at['load_average']} before "
            f"and {after} after; read ceilings {between}jax {at['jax']}, Python {at['python']}; "
            f"{at['date']}, {document['seconds']:.0f} s, {settings['rounds']} rounds."
        ),
        "; ".join(versions) + ".",
        (
            "Tokens per second, the median of the trials; random weights of real sizes. Engines "
            "take turns, trial by trial; only one computes at a time. `N x P` is N prompts of P "
            f"tokens; decode is the {steps} steps after the first token."
        ),
        (
            "The roofline is the longer of reading and multiplying at the ceilings around each "
            "trial, over the time it took, by rooflax's count of bytes and operations, for the "
            "best peer too. A ratio has its 99% interval from five rounds up."
        ),
    ]
    return [f"Written by `python {command}`; every trial is in the JSON beside it.", bullets(facts)]


def version(about: Any) -> str:
    return about["version"] if isinstance(about, dict) else about


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """A row of a model's table."""
    engines, best = found["engines"], found["best_peer"]
    speeds = [_speed_cell(engines.get(name), name == best) for name in (OURS, *PEERS)]
    peer = f"{engines[best]['roofline']:.1%}" if best else ""
    own = f"{engines[OURS]['roofline']:.1%}"
    verdict = (found["target"] or "", met(found["met"]))
    return (test_name(found), found["width"], *speeds, ratio_of(found), own, peer, *verdict)


def _speed_cell(engine: dict[str, Any] | None, is_best: bool) -> str:
    if engine is None:
        return ""
    text = f"{speed(engine):,.0f}"
    return f"**{text}**" if is_best else text


def best_cells(found: dict[str, Any]) -> tuple[str, ...]:
    ours, peer, ratio = found["ours"], found["best_peer"], found["ratio"]
    theirs = f"{peer[0]:,.0f} ({peer[1]} {peer[2]})" if peer else ""
    test = test_name(found | {"test": "prefill"})
    shown = "" if ratio is None else f"{ratio:.2f}x"
    own = f"{ours[0]:,.0f} ({ours[2]})"
    return (found["model"], test, own, theirs, shown, found["target"], met(found["met"]))


def ratio_of(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return ""
    between = found["interval"]
    span = f" ({between['low']:.2f}-{between['high']:.2f})" if between else ""
    return f"{found['ratio']:.2f}x{span}"


def beside(found: dict[str, Any]) -> str:
    return f"{ratio_of(found)} of {found['best_peer']}, " if found["best_peer"] else ""


def test_name(found: dict[str, Any]) -> str:
    return f"{found['test']} {found['batch']} x {found['prompt_tokens']}"


def met(verdict: bool | None) -> str:
    return {None: "", True: "yes", False: "**no**"}[verdict]


def short_of_target(document: dict[str, Any]) -> str:
    """The rows that miss, as bullets."""
    missed = [
        f"{found['model']} {found['width']}, {test_name(found)}: {beside(found)}"
        f"{found['engines'][OURS]['roofline']:.1%} of the roofline; the target is {found['target']}"
        for found in document["rows"]
        if found["met"] is False
    ] + [
        f"{found['model']}, prefill {found['batch']} x {found['prompt_tokens']} in the best width "
        f"of each: {found['ratio']:.2f}x; the target is {found['target']}"
        for found in document["best_prefill"]
        if found["met"] is False
    ]
    return bullets(missed)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" for _ in header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def bullets(lines: list[str]) -> str:
    return "\n".join(
        textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ") for line in lines
    )
