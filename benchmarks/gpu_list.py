"""What `gpu.py` measures, in the order of what is worth most if the time runs out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Figures = dict[str, Any]
BUDGETS_S = {1: 350, 2: 590, 3: 590}
START_S = 8
"""That a process is expected to take before its first case: imports, and the card's context."""
LOOPS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}
HAS_XLA = ("linear", "attention", "experts", "model")
PEERS = ("transformers", "torch")


@dataclass(frozen=True)
class Case:
    """A line of figures.jsonl.

    Attributes:
        job: a function of `gpu.run_job`.
        process: cases behind each other with the same name and environment share one.
        expected_s: on a card, without the process's start. Estimated: what compiling took for a
            described H200, and what the work should take.
        target: what is wanted of it; for the table.
        environment: variables of its own.
    """

    name: str
    part: int
    job: str
    arguments: Figures
    process: str
    expected_s: float
    target: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """After which it is ended."""
        return 15 + 2 * self.expected_s

    @property
    def key(self) -> tuple[str, dict[str, str]]:
        """Of its process."""
        return self.process, self.environment


def expected_s(given: Iterable[Case]) -> float:
    """Of a part, with its processes' starts."""
    total, before = 0.0, None
    for case in given:
        total += case.expected_s + (START_S if case.key != before else 0)
        before = case.key
    return total


def cases(tiny: bool) -> list[Case]:
    """All of them; tiny ones share a process, but for those with an environment, which are last."""
    found = [*_kernels(tiny), *_slopes(tiny), *_ladder(tiny), *_whole(tiny)]
    if not tiny:
        return found
    shared = [replace(case, process="dry run") for case in found]
    return sorted(shared, key=lambda case: (case.part, bool(case.environment)))


def _kernels(tiny: bool) -> list[Case]:
    found: list[Case] = []

    def add(process: str, name: str, job: str, seconds: float, **arguments: Any) -> None:
        arguments["tiny"] = tiny
        found.append(Case(name, 1, job, arguments, process, seconds, "equal, then GB/s"))

    def linears(process: str, rows: int, *formats: str) -> None:
        seconds = 7.0 if rows == 8 else 4.0
        for format in formats:
            name = f"linear {format} rows {rows}"
            add(process, name, "linear", seconds, format=format, rows=rows)

    def attention(process: str, kind: str, width: int, **how: Any) -> None:
        label = " ".join(f"{k} {v}" for k, v in how.items() if v)
        plain = {"queries": 1, "window": None, "patterned": False}
        name = f"attention {kind} head {width} {label}"
        add(process, name, "attention", 5.0, kind=kind, head_dim=width, **{**plain, **how})

    def experts(kind: str, *counts: int) -> None:
        for n in counts:
            add("experts", f"experts {kind} tokens {n}", "experts", 6.0, kind=kind, tokens=n)

    def races(widths: Iterable[int], *linears: tuple[str, int]) -> None:
        for format, n in linears:
            name = f"race of linear {format}, {n} stages"
            add("race", name, "linear race", 5.0, format=format, stages=n)
        for width in widths:
            name = f"race of attention, head {width}"
            add("race", name, "attention race", 5.0, head_dim=width)

    if tiny:
        linears("first", 1, "w4a16", "bfloat16")
        linears("first", 40, "w4a16")
        add("race", "race of 2 stages", "race", 5.0, stages=2)
        races((64,), ("w4a16", 2))
        attention("attention", "bfloat16", 64, queries=1)
        attention("attention", "bfloat16", 64, queries=40, patterned=True)
        add("step", "decode step head 64", "step", 5.0, head_dim=64)
        experts("bfloat16", 1)
        return found
    linears("first", 1, "w4a16", "bfloat16")
    linears("first", 512, "w4a16")
    for stages in (3, 4, 6):
        add("race", f"race of {stages} stages", "race", 5.0, stages=stages)
    races((128, 64), ("w4a16", 3), ("w4a16", 4), ("w8a16", 4), ("mxfp4-a16", 6))
    for width in (128, 64):
        attention("attention", "bfloat16", width, queries=1)
        attention("attention", "bfloat16", width, queries=512)
    for width in (128, 64):
        add("attention", f"decode step head {width}", "step", 5.0, head_dim=width)
    codes = ("mxfp4-a16", "w8a16", "w8a8", "w8a16-g32", "w4a8", "fp8-a16")
    linears("one row", 1, *codes)
    experts("mxfp4-a16", 1, 8, 512)
    experts("bfloat16", 1, 512)
    linears("eight rows", 8, "bfloat16", "w4a16", *codes[:4])
    linears("many rows", 512, *(code for code in codes if not code.endswith("a8")))
    linears("many rows", 64, "w4a16")
    for width in (128, 64):
        attention("masks", "bfloat16", width, queries=512, patterned=True)
    attention("masks", "int8", 128, queries=1)
    attention("masks", "float32", 64, queries=1)
    attention("masks", "bfloat16", 64, queries=1, window=128)
    attention("masks", "bfloat16", 128, queries=1, patterned=True)
    attention("masks", "bfloat16", 64, queries=512, window=128)
    return found


FORMATS = (
    ("llama-3.1-8b", "bf16", {}, "75% of bandwidth"),
    ("llama-3.1-8b", "int4", {"quantize": "w4a16"}, "50% of bandwidth"),
    ("gpt-oss-20b", "mxfp4", {"quantize": "mxfp4-a16"}, "50% of bandwidth"),
    ("llama-3.1-8b", "int8", {"quantize": "w8a16"}, "65% of bandwidth"),
)
TINY = {"llama-3.1-8b": "llama-tiny", "gpt-oss-20b": "gpt-oss-tiny"}


def _work(tiny: bool) -> tuple[Figures, Figures]:
    """Decoding, and a long prompt."""
    short = {"prompt_tokens": 16, "output_tokens": 4, "trials": 2} if tiny else {}
    decode = {"prompt_tokens": 128, "output_tokens": 128, "trials": 5} | short
    return decode, {"prompt_tokens": 4096, "output_tokens": 2, "trials": 5} | short


def _slopes(tiny: bool) -> list[Case]:
    """Two depths: their difference is what layers cost, the rest what everything else does."""
    found = [Case("ceilings", 2, "ceilings", {"tiny": tiny}, "ceilings", 10)]
    decode, long = _work(tiny)
    depths = (2, 4) if tiny else (4, 8)

    def rows(name: str, model: str, work: Figures, *layers: int, **more: Any) -> list[Case]:
        chosen, seconds = TINY[model] if tiny else model, 36 if "gpt-oss" in model else 20
        made = []
        for n in layers:
            label = f"{name}, {n} layers"
            arguments = {"model": chosen, "work": work, "layers": n, **more}
            made.append(Case(label, 2, "model", arguments, label, seconds))
        return made

    for model, width, precision, _ in FORMATS[1:2] if tiny else FORMATS:
        found += rows(f"decode {model} {width}", model, decode, *depths, precision=precision)
    llama, _, int4, _ = FORMATS[1]
    buffers = rows("command buffers for loops, int4", llama, decode, *depths[-1:], precision=int4)
    found += [replace(case, environment=LOOPS) for case in buffers]
    for chunk in (8,) if tiny else (4096, 512):
        name = f"prefill bf16 by {chunk}"
        found += rows(name, llama, long, *depths[-1 if tiny else 0 :], precision={}, chunk=chunk)
    return found


def _whole(tiny: bool) -> list[Case]:
    decode, long = _work(tiny)
    found: list[Case] = []

    def add(name: str, job: str, seconds: float, target: str, **arguments: Any) -> None:
        found.append(Case(name, 3, job, arguments, name, seconds, target))

    def ours(name: str, model: str, target: str, work: Figures, **more: Any) -> None:
        chosen, seconds = TINY[model] if tiny else model, 45 if "gpt-oss" in model else 32
        add(name, "model", seconds, target, model=chosen, work=work, **more)

    for model, width, precision, target in FORMATS[:1] if tiny else FORMATS:
        ours(f"decode {model} {width}", model, target, decode, precision=precision)
    if not tiny:
        ours("prefill bf16", "llama-3.1-8b", "60% of the matmul rate", long, precision={})
    for bits in (8, 4) if importlib.util.find_spec("torch") else ():
        add(f"torch int{bits}", "torch", 70, "we: 1.2x", bits=bits, tiny=tiny, work=decode)
    if not tiny or importlib.util.find_spec("transformers"):
        add("transformers", "transformers", 70, "we: 1.2x", tiny=tiny, work=decode)
    return found


def _ladder(tiny: bool) -> list[Case]:
    """One option after the other, of four layers: without jit every operation is compiled."""
    from benchmarks.gpu_models import LADDER, SLOWEST

    found, options, layers = [], dict(SLOWEST), 1 if tiny else 4
    work = {"prompt_tokens": 2 if tiny else 16, "output_tokens": 2 if tiny else 4, "trials": 1}
    arguments = {"model": "gpt-oss-20b", "work": work, "precision": {}, "layers": layers}
    if tiny:
        arguments["model"] = TINY["gpt-oss-20b"]
    for label, change, theirs in LADDER:
        options = options | change
        name, target = f"ladder: {label}, {layers} layers", f"A100: {theirs}" if theirs else ""
        own = {**arguments, "options": options}
        seconds = 12 if found else 35
        found.append(Case(name, 2, "model", own, "ladder", seconds, target))
    return found[:1] if tiny else found
