"""What `gpu.py` measures, in the order of what is worth most if the time runs out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Figures = dict[str, Any]
BUDGETS_S = {1: 360, 2: 360, 3: 590, 4: 590}
"""Of a part. The first two fit fifteen minutes with a machine's start: one decides between the
answers that kernels could take, one measures models. The others are for another day."""
COUNTED, COUNTERS_S, COUNTERS_LIMIT_S = 3, 30, 75
"""Kernels that NVIDIA's profiler runs behind the first part, the slowest beside what the law of
speed says; what each is expected to take, with JAX's start, its weights and its reference; and
after what it is ended."""
START_S = 8
"""That a process is expected to take before its first case: imports, and the card's context."""
LOOPS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}
HAS_XLA = ("linear", "attention", "experts", "model", "mixed")
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
    """Of a part, with its processes' starts, and the profiler behind the first."""
    total, before = 0.0, None
    for case in given:
        total += case.expected_s + (START_S if case.key != before else 0)
        before = case.key
    return total + (COUNTED * COUNTERS_S if before and case.part == 1 else 0)


def cases(tiny: bool) -> list[Case]:
    """All of them; tiny ones share a process, but for those with an environment, which are last."""
    found = [*_kernels(tiny), *_engine(tiny), *_slopes(tiny), *_ladder(tiny), *_whole(tiny)]
    if not tiny:
        return found
    shared = [replace(case, process="dry run") for case in found]
    return sorted(shared, key=lambda case: (case.part, bool(case.environment)))


ANSWER_S = 2.5
"""To compile, check and time a kernel with another answer to one question of its."""


def _kernels(tiny: bool) -> list[Case]:
    """Part 1 has ceilings and the kernels whose answers decide; part 3 other kernels and races."""
    found: list[Case] = []

    def add(process: str, name: str, job: str, seconds: float, **arguments: Any) -> None:
        part = 1 if arguments.get("answers") else 3
        seconds += ANSWER_S * arguments.get("answers", 0)
        arguments["tiny"] = tiny
        found.append(Case(name, part, job, arguments, process, seconds, "equal, then GB/s"))

    def linears(process: str, rows: int, *formats: str, answers: int = 0) -> None:
        seconds = 5.0 if rows == 8 else 3.5
        for format in formats:
            how = {"format": format, "rows": rows, "answers": answers}
            add(process, f"linear {format} rows {rows}", "linear", seconds, **how)

    def attention(process: str, kind: str, width: int, answers: int = 0, **how: Any) -> None:
        label = " ".join(f"{k} {v}" for k, v in how.items() if v)
        plain = {"queries": 1, "window": None, "patterned": False, "answers": answers}
        name = f"attention {kind} head {width} {label}".rstrip()
        given = {**plain, **how}
        add(process, name, "attention", 5.0, kind=kind, head_dim=width, **given)

    def experts(kind: str, *counts: int, answers: int = 0) -> None:
        for n in counts:
            how = {"kind": kind, "tokens": n, "answers": answers}
            add("experts", f"experts {kind} tokens {n}", "experts", 6.0, **how)

    def races(widths: Iterable[int], *linears: tuple[str, int]) -> None:
        for format, n in linears:
            name = f"race of linear {format}, {n} stages"
            add("race", name, "linear race", 5.0, format=format, stages=n)
        for width in widths:
            name = f"race of attention, head {width}"
            add("race", name, "attention race", 5.0, head_dim=width)

    if tiny:
        found.append(Case("ceilings", 1, "ceilings", {"tiny": tiny}, "first", 10))
        found.append(Case("null kernel", 1, "null", {"tiny": tiny}, "first", 2))
        linears("first", 1, "w4a16", "bfloat16", "fp8-a16", answers=1)
        linears("first", 40, "w4a16", answers=1)
        attention("attention", "bfloat16", 64, queries=1, answers=1)
        attention("attention", "int8", 64, queries=1, answers=1)
        attention("attention", "float32", 64, queries=1, answers=1)
        attention("attention", "bfloat16", 320, queries=1, answers=1)
        attention("attention", "bfloat16", 320, queries=1, latent=256, answers=1)
        attention("attention", "bfloat16", 64, queries=40, patterned=True)
        add("step", "decode step head 64", "step", 5.0, head_dim=64, answers=1)
        experts("bfloat16", 1, answers=1)
        add("race", "race of 2 stages", "race", 5.0, stages=2)
        races((64,), ("w4a16", 2))
        return found
    found.append(Case("ceilings", 1, "ceilings", {"tiny": tiny}, "rows", 10))
    found.append(Case("null kernel", 1, "null", {"tiny": tiny}, "rows", 2))
    linears("rows", 1, "w4a16", "mxfp4-a16", "bfloat16", "w8a16", answers=2)
    linears("rows", 1, "fp8-a16", answers=1)
    linears("rows", 8, "bfloat16", "w4a16", "mxfp4-a16", "w8a16", answers=1)
    attention("attention", "bfloat16", 128, queries=1, answers=3)
    attention("attention", "int8", 128, queries=1, answers=3)
    attention("attention", "bfloat16", 512, queries=1, answers=1)
    attention("attention", "bfloat16", 576, queries=1, latent=512, answers=1)
    attention("attention", "float32", 64, queries=1, answers=1)
    attention("attention", "bfloat16", 64, queries=1, answers=1)
    attention("attention", "bfloat16", 128, queries=512, answers=2)
    add("attention", "decode step head 128", "step", 5.0, head_dim=128, answers=2)
    experts("mxfp4-a16", 1, 8, answers=2)
    linears("many rows", 512, "w4a16", "mxfp4-a16", answers=2)
    linears("many rows", 64, "w4a16", answers=1)
    experts("mxfp4-a16", 512)
    experts("bfloat16", 1, 512)
    for stages in (3, 4, 6):
        add("race", f"race of {stages} stages", "race", 5.0, stages=stages)
    races((512, 128, 64), ("w4a16", 3), ("w4a16", 4), ("w8a16", 4), ("mxfp4-a16", 6))
    linears("other rows", 1, "w8a8", "w8a16-g32", "w4a8")
    linears("other rows", 8, "w8a8", "w8a16-g32")
    linears("other rows", 512, "w8a16", "w8a16-g32", "fp8-a16")
    add("masks", "decode step head 64", "step", 5.0, head_dim=64, answers=0)
    attention("masks", "bfloat16", 64, queries=512)
    for width in (128, 64):
        attention("masks", "bfloat16", width, queries=512, patterned=True)
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


BATCHES: tuple[tuple[int, int, int, str | None], ...] = (
    (2, 8, 1024, None), (2, 32, 4096, None), (2, 64, 1024, None), (2, 32, 4096, "int8"),
    (2, 8, 4096, None), (3, 64, 4096, None), (3, 32, 1024, None),
)  # fmt: skip
"""A part, rows, tokens of each one's context, and the type of the KV cache."""
MIXED_TOKENS = 128
"""Of rows that decode while other prompts are taken, so that none ends before."""


def _engine(tiny: bool) -> list[Case]:
    """Part 2: whole models of one row, batches and contexts of eight layers, and a peer. Part 3:
    more of these, and prompts that come while others decode."""
    decode, _ = _work(tiny)
    found: list[Case] = []
    for model, width, precision, target in FORMATS[1:2] if tiny else FORMATS[1:3]:
        chosen, seconds = TINY[model] if tiny else model, 55 if "gpt-oss" in model else 36
        how = {"model": chosen, "work": decode, "precision": precision}
        name = f"decode {model} {width}"
        found.append(Case(name, 2, "model", how, name, seconds, target))
    llama, width, int4, _ = FORMATS[1]
    how: Figures = {"model": TINY[llama] if tiny else llama, "layers": 2 if tiny else 8}
    small = {"batch": 2, "prompt_tokens": 16, "output_tokens": 4} if tiny else {}
    for part, rows, context, kv in BATCHES[3:4] if tiny else BATCHES:
        work = {"batch": rows, "prompt_tokens": context, "output_tokens": 32, "trials": 2} | small
        own = {**how, "work": work, "precision": {**int4, **({"kv_dtype": kv} if kv else {})}}
        name = f"{rows} rows of {context} tokens, {width}, {kv or 'bfloat16'} KV, 8 layers"
        seconds = 36 if rows * context > 1 << 17 else 24
        found.append(Case(name, part, "model", own, name, seconds, "beside one row"))
    work = {"batch": 32, "prompt_tokens": 1024, "output_tokens": MIXED_TOKENS, "trials": 2} | small
    own, name = {**how, "work": work, "precision": int4}, f"16 rows decode, 16 prompts, {width}"
    found.append(Case(name, 3, "mixed", own, name, 20, "beside each alone"))
    if importlib.util.find_spec("torch"):
        peer = {"bits": 8, "tiny": tiny, "work": decode, "tunes": False}
        found.append(Case("torch int8, not tuned", 2, "torch", peer, "torch", 45, "we: 1.2x"))
    return found


def _slopes(tiny: bool) -> list[Case]:
    """Two depths: their difference is what layers cost, the rest what everything else does."""
    found: list[Case] = []
    decode, long = _work(tiny)
    depths = (2, 4) if tiny else (4, 8)

    def rows(name: str, model: str, work: Figures, *layers: int, **more: Any) -> list[Case]:
        chosen, seconds = TINY[model] if tiny else model, 36 if "gpt-oss" in model else 20
        made = []
        for n in layers:
            label = f"{name}, {n} layers"
            arguments = {"model": chosen, "work": work, "layers": n, **more}
            made.append(Case(label, 4, "model", arguments, label, seconds))
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
        part = 3 if job in PEERS else 4
        found.append(Case(name, part, job, arguments, name, seconds, target))

    def ours(name: str, model: str, target: str, work: Figures, **more: Any) -> None:
        chosen, seconds = TINY[model] if tiny else model, 45 if "gpt-oss" in model else 32
        add(name, "model", seconds, target, model=chosen, work=work, **more)

    for model, width, precision, target in FORMATS[:1] if tiny else (FORMATS[0], FORMATS[3]):
        ours(f"decode {model} {width}", model, target, decode, precision=precision)
    if not tiny:
        ours("prefill bf16", "llama-3.1-8b", "60% of the matmul rate", long, precision={})
    if importlib.util.find_spec("torch"):
        how = {"bits": 4, "tiny": tiny, "work": decode, "tunes": True}
        add("torch int4", "torch", 70, "we: 1.2x", **how)
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
        found.append(Case(name, 3, "model", own, "ladder", seconds, target))
    return found[:1] if tiny else found
