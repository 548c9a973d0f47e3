"""The rows of a comparison, from its trials alone, and the page that shows them."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import Any

import plan
from plan import AT_ONCE, OUR_WAYS, OURS, PEERS, SERVING_PEER

from rooflax.bench.ceilings import Ceiling
from rooflax.bench.counting import StepCost
from rooflax.bench.figures import MIN_PAIRS, Summary, paired_ratio
from rooflax.bench.measure import share_of_roofline

SEEN = ("ttft_p50_s", "ttft_p99_s", "longest_gap_s")
SHAPE = ("batch", "prompt_tokens", "new_tokens")
AFTER_SPEEDS = ("vs best peer", "roofline", "best peer's", "target", "met")
SERVING_HEADER = (
    "model", "arrivals", "engine", "tok/s", f"of {SERVING_PEER}'s", "of the ideal", "TTFT p50 ms",
    "p99 ms", "longest gap ms", "target", "met",
)  # fmt: skip
BEST_HEADER = ("model", "test", OURS, "best peer", "ratio", "target", "met")


def with_rows(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its rows computed anew from `jobs` and `serving`."""
    rows = [row(job, test) for job in document["jobs"] for test in shape(job).tests]
    cpu = document["environment"]["cpu"]
    serving = [one for found in document.get("serving", ()) for one in serving_rows(found, cpu)]
    return document | {"rows": rows, "best_prefill": best_prefill(rows), "serving_rows": serving}


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
    """Of the roofline that was read around a trial; older documents have no size of the buffer."""
    before, after = (Ceiling(**{"buffer_bytes": 0, **trial[side]}) for side in ("before", "after"))
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
        row = head["model"], head["width"], head["batch"]
        verdict = plan.decode_verdict(*row, ratio, ours["roofline"], peer_share)
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
    ratio, wanted = None if peer is None else ours[0] / peer[0], plan.prefill_ratio(key[0])
    return {
        **dict(zip(("model", "batch", "prompt_tokens"), key, strict=True)),
        "ours": ours,
        "best_peer": peer,
        "ratio": ratio,
        "target": f">= {wanted}x",
        "met": None if ratio is None else ratio >= wanted,
    }


def serving_rows(found: dict[str, Any], cpu: str) -> list[dict[str, Any]]:
    """A row per engine of one kind of arrivals, in the order of the document."""
    tokens = found["requests"] * found["new_tokens"]
    prompts = sum(found["prompt_tokens"])
    rows = {}
    for name, engine in found["engines"].items():
        trials = engine["trials"]
        rows[name] = {
            **{key: found[key] for key in ("model", "width", "load")},
            "rate": found.get("rate"),
            "engine": name,
            "tok_per_s": Summary.of([tokens / trial["seconds"] for trial in trials]).as_json(),
            **{key: median(trial[key] for trial in trials) for key in SEEN},
            "ratio": None,
            "of_ideal": None,
        }
        if name in OUR_WAYS and "parts" in found:
            rows[name]["of_ideal"] = median(
                plan.ideal_s(prompts, tokens, parts) / trial["seconds"]
                for parts, trial in zip(found["parts"], trials, strict=True)
            )
    peer = rows.get(SERVING_PEER)
    for name, one in rows.items():
        if peer and name in OUR_WAYS and found["load"] == AT_ONCE:
            one["ratio"] = speed(one) / speed(peer)
        one |= vars(serving_verdict(one, peer, cpu))
    return list(rows.values())


def serving_verdict(one: dict[str, Any], peer: dict[str, Any] | None, cpu: str) -> plan.Verdict:
    """Of a row; a peer's has no target, nor has `LLM.generate`'s longest gap."""
    if one["engine"] not in OUR_WAYS:
        return plan.Verdict()
    if one["load"] != AT_ONCE:
        words = f"TTFT below {SERVING_PEER}'s"
        parts = ("ttft_p50_s", "ttft_p99_s")
        below = None if peer is None else all(one[part] < peer[part] for part in parts)
        return plan.Verdict(words, below)
    wanted, share_wanted = plan.serving_ratio(cpu), plan.SERVING_SHARE
    words, kept = f"{share_wanted:.0%} of the ideal", one["of_ideal"] >= share_wanted
    if one["engine"] == OUR_WAYS[0]:
        words = f">= {wanted}x, {words}, gap <= {plan.LONGEST_GAP_S:g} s"
        kept = kept and one["longest_gap_s"] <= plan.LONGEST_GAP_S
        kept = kept and (None if peer is None else one["ratio"] >= wanted)
    return plan.Verdict(words, kept)


def rendered(document: dict[str, Any], picture: str | None = None) -> str:
    """The page of a document; `picture` is the file name of its plot."""
    parts = ["# rooflax beside its peers", *introduction(document)]
    if picture is not None:
        parts.append(f"![Speed of {OURS} over that of the best peer, by test and width]({picture})")
    names = [name for name in PEERS if document["engines"].get(name, "left out") != "left out"]
    header = ("test", "width", OURS, *names, *AFTER_SPEEDS)
    for model in dict.fromkeys(found["model"] for found in document["rows"]):
        rows = [found for found in document["rows"] if found["model"] == model]
        parts += [f"## {model}", table(header, [cells(found, names) for found in rows])]
    if document["best_prefill"]:
        lines = [best_cells(found) for found in document["best_prefill"]]
        parts += ["## Prefill, the best width of each", table(BEST_HEADER, lines)]
    if document["serving_rows"]:
        parts += serving_section(document)
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
    ]
    batches_facts = [
        (
            f"Tokens per second, the median of the trials; {weights_of(document)}. Engines "
            "are interleaved, trial by trial; only one computes at a time. `N x P` is N prompts of "
            f"P tokens; decode is the {steps} steps after the first token."
        ),
        (
            "The roofline is the longer of reading and multiplying at the ceilings around each "
            "trial, over the time it took, by rooflax's count of bytes and operations, for the "
            "best peer too. A ratio has its 99% interval from five rounds up."
        ),
    ]
    if document["jobs"]:
        facts += batches_facts
    return [f"Written by `python {command}`; every trial is in the JSON beside it.", bullets(facts)]


def weights_of(document: dict[str, Any]) -> str:
    """What is in the files."""
    names = dict.fromkeys(job["model"] for job in document["jobs"])
    published = [f"{n} is {plan.PUBLISHED[n]}" for n in names if n in plan.PUBLISHED]
    random = ["random weights of real sizes"] * (len(published) < len(names))
    return "; ".join([*published, *random])


def version(about: Any) -> str:
    return about["version"] if isinstance(about, dict) else about


def serving_section(document: dict[str, Any]) -> list[str]:
    """What was served, and the table."""
    rows, one = document["serving_rows"], document["serving"][0]
    lengths = one["prompt_tokens"]
    facts = [
        (
            f"{one['requests']} requests with prompts of {min(lengths)} to {max(lengths)} tokens, "
            f"{one['new_tokens']} new ones each, greedy, on {one['slots']} slots. {OUR_WAYS[0]} "
            f"and {OUR_WAYS[1]} are rooflax's; {SERVING_PEER} batches as its server does. A figure "
            "is the median of the rounds'; p99 is the slowest request of a round."
        ),
        (
            "The ideal is the prompts' tokens at the rate of prefill "
            f"{_parts_name('prefill')} and the new ones at that of decode {_parts_name('decode')}, "
            "same format, measured in the same round."
        ),
        (
            f"Poisson arrivals come at {plan.LOAD} of the requests a second that {SERVING_PEER} "
            "completes when all come at once, at the same times for both; the time to first "
            "token (TTFT) counts from the arrival."
        ),
    ]
    return ["## Serving", bullets(facts), table(SERVING_HEADER, [serving_cells(r) for r in rows])]


def _parts_name(part: str) -> str:
    return f"{plan.PARTS[part].batch} x {plan.PARTS[part].prompt_tokens}"


def serving_cells(found: dict[str, Any]) -> tuple[str, ...]:
    ratio, ideal = found["ratio"], found["of_ideal"]
    return (
        f"{found['model']} {found['width']}",
        arrivals(found),
        found["engine"],
        f"{speed(found):,.0f}",
        "" if ratio is None else f"{ratio:.2f}x",
        "" if ideal is None else f"{ideal:.0%}",
        *(f"{found[key] * 1e3:,.0f}" for key in SEEN),
        found["target"] or "",
        met(found["met"]),
    )


def arrivals(found: dict[str, Any]) -> str:
    """All at once, or at which rate."""
    return found["load"] + (f" {found['rate']:.2f}/s" if found["rate"] else "")


def cells(found: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    """A row of a model's table; `names` are the peers'."""
    engines, best = found["engines"], found["best_peer"]
    speeds = [_speed_cell(engines.get(name), name == best) for name in (OURS, *names)]
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
    missed += [
        f"serving {found['model']} {found['width']} by {found['engine']}, {arrivals(found)}: "
        f"{served(found)}; the target is {found['target']}"
        for found in document["serving_rows"]
        if found["met"] is False
    ]
    return bullets(missed)


def served(found: dict[str, Any]) -> str:
    """The figures that a target is about."""
    if found["load"] != AT_ONCE:
        return f"{found['ttft_p50_s'] * 1e3:,.0f} and {found['ttft_p99_s'] * 1e3:,.0f} ms"
    beside = "" if found["ratio"] is None else f"{found['ratio']:.2f}x of {SERVING_PEER}, "
    gap = f"longest gap {found['longest_gap_s']:.2f} s"
    return f"{beside}{found['of_ideal']:.0%} of the ideal, {gap}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" for _ in header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def bullets(lines: list[str]) -> str:
    return "\n".join(
        textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ") for line in lines
    )
