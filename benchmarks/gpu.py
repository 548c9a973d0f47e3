"""All figures of a GPU, in three parts of at most six, ten and ten minutes.

    python benchmarks/gpu.py OUT --part 1     kernels, each alone: right first, then how fast
    python benchmarks/gpu.py OUT --part 2     ceilings; models at 4 and 8 layers
    python benchmarks/gpu.py OUT --part 3     whole models, a prompt of 4,096, peers, the ladder
    python benchmarks/gpu.py OUT --only NAME ...   some cases of any part
    python benchmarks/gpu.py OUT --dry-run    every part on the CPU, tiny, to see that it works

Each case is a process with a limit of its own, and a line of OUT/figures.jsonl as soon as it is
known; what is not written when the time ends is lost. A case whose kernel fails runs again with
XLA, and its line says so. Compiled programs are kept in OUT/cache, for all parts. A later line of
a case stands for the earlier ones; OUT/table.md is made of all. `--packages FOLDER` is where
transformers lies if the machine has none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

BUDGETS_S = {1: 350, 2: 590, 3: 590}
KERNEL_S, MODEL_S, WHOLE_S = 25, 45, 120
Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One process.

    Attributes:
        job: a function of JOBS.
        limit_s: after which it is ended.
        target: what is wanted of it; for the table.
        environment: variables of its own.
    """

    name: str
    part: int
    job: str
    arguments: Figures
    limit_s: int
    target: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def cases(tiny: bool) -> list[Case]:
    """In order of what is worth most if the time runs out."""
    return [*_kernels(tiny), *_slopes(tiny), *_whole(tiny)]


def _kernels(tiny: bool) -> list[Case]:
    def case(name: str, job: str, **arguments: Any) -> Case:
        return Case(name, 1, job, {**arguments, "tiny": tiny}, KERNEL_S, "equal, then GB/s")

    found = [
        case(f"linear w4a16 rows {rows}", "linear", format="w4a16", rows=rows)
        for rows in (1, 40 if tiny else 512)
    ]
    found.append(case("linear bfloat16 rows 1", "linear", format="bfloat16", rows=1))
    stages = (2,) if tiny else (3, 4, 6)
    found += [case(f"race of {n} stages", "race", stages=n) for n in stages]
    shared = (("w4a16", 3), ("w4a16", 4), ("w8a16", 4), ("mxfp4-a16", 6))
    for format, n in (("w4a16", 2),) if tiny else shared:
        name = f"race of linear {format}, {n} stages"
        found.append(case(name, "linear race", format=format, stages=n))
    for width in (64,) if tiny else (64, 128):
        found.append(case(f"race of attention, head {width}", "attention race", head_dim=width))
    kinds = ("bfloat16",) if tiny else ("bfloat16", "int8", "float32")
    heads, near = ((64,), 20) if tiny else ((128, 64), 128)
    plain = {"queries": 1, "window": None, "patterned": False}
    shapes = [(kind, width, plain) for kind in kinds for width in heads]
    chunk = 40 if tiny else 512
    changes = [
        {"queries": chunk, "patterned": True},
        {"queries": chunk},
        {"window": near},
        {"patterned": True},
        {"queries": chunk, "window": near},
    ]
    for change in changes[:1] if tiny else changes:
        shapes += [("bfloat16", width, plain | change) for width in heads]
    for kind, width, how in shapes:
        label = " ".join(f"{k} {v}" for k, v in how.items() if v)
        name = f"attention {kind} head {width} {label}"
        found.append(case(name, "attention", kind=kind, head_dim=width, **how))
    for width in heads:
        found.append(case(f"decode step head {width}", "step", head_dim=width))
    formats = ("mxfp4-a16", "w8a16", "w8a8", "w8a16-g32", "w4a8", "fp8-a16")
    for format in () if tiny else formats:
        found.append(case(f"linear {format} rows 1", "linear", format=format, rows=1))
    for kind in ("bfloat16",) if tiny else ("mxfp4-a16", "bfloat16"):
        for tokens in (1,) if tiny else (1, 8, 512):
            found.append(
                case(f"experts {kind} tokens {tokens}", "experts", kind=kind, tokens=tokens)
            )
    for format in () if tiny else ("bfloat16", "w4a16", *formats):
        found.append(case(f"linear {format} rows 8", "linear", format=format, rows=8))
    for format in () if tiny else ("w8a16", "mxfp4-a16", "w8a16-g32", "fp8-a16", "w8a8"):
        found.append(case(f"linear {format} rows 512", "linear", format=format, rows=512))
    for rows in () if tiny else (16, 64):
        found.append(case(f"linear w4a16 rows {rows}", "linear", format="w4a16", rows=rows))
    return found


def _work(tiny: bool) -> tuple[Figures, Figures]:
    """Decoding, and a long prompt."""
    short = {"prompt_tokens": 16, "output_tokens": 4, "trials": 2} if tiny else {}
    decode = {"prompt_tokens": 128, "output_tokens": 128, "trials": 5} | short
    return decode, {"prompt_tokens": 4096, "output_tokens": 2, "trials": 5} | short


FORMATS = (
    ("llama-3.1-8b", "bf16", {}, "75% of bandwidth"),
    ("llama-3.1-8b", "int4", {"quantize": "w4a16"}, "50% of bandwidth"),
    ("gpt-oss-20b", "mxfp4", {"quantize": "mxfp4-a16"}, "50% of bandwidth"),
    ("llama-3.1-8b", "int8", {"quantize": "w8a16"}, "65% of bandwidth"),
)
TINY = {"llama-3.1-8b": "llama-tiny", "gpt-oss-20b": "gpt-oss-tiny"}
LOOPS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}


def _slopes(tiny: bool) -> list[Case]:
    """Two depths: their difference is what layers cost, the rest what everything else does."""
    found = [Case("ceilings", 2, "ceilings", {"tiny": tiny}, 60)]
    decode, long = _work(tiny)
    depths = (2, 4) if tiny else (4, 8)

    def row(name: str, model: str, work: Figures, precision: Figures, layers: int) -> Case:
        name = f"{name}, {layers} layers"
        chosen = TINY[model] if tiny else model
        arguments = {"model": chosen, "work": work, "precision": precision, "layers": layers}
        return Case(name, 2, "model", arguments, MODEL_S)

    for model, width, precision, _ in FORMATS[1:2] if tiny else FORMATS:
        found += [row(f"decode {model} {width}", model, decode, precision, n) for n in depths]
    if tiny:
        return found
    buffers = row("command buffers for loops, int4", FORMATS[1][0], decode, FORMATS[1][2], 8)
    prefill = row("prefill bf16", FORMATS[0][0], long, {}, 8)
    return [*found, replace(buffers, environment=LOOPS), prefill]


def _whole(tiny: bool) -> list[Case]:
    from benchmarks.gpu_models import LADDER, SLOWEST

    decode, long = _work(tiny)
    found = []
    for model, width, precision, target in FORMATS[:1] if tiny else FORMATS:
        chosen = TINY[model] if tiny else model
        arguments = {"model": chosen, "work": decode, "precision": precision}
        found.append(Case(f"decode {model} {width}", 3, "model", arguments, WHOLE_S, target))
    for bits in (8, 4) if importlib.util.find_spec("torch") else ():
        peer = {"bits": bits, "tiny": tiny, "work": decode}
        found.append(Case(f"torch int{bits}", 3, "torch", peer, WHOLE_S, "we: 1.2x"))
    if tiny:
        return found
    arguments = {"model": "llama-3.1-8b", "work": long, "precision": {}}
    found.append(Case("prefill bf16", 3, "model", arguments, WHOLE_S, "60% of the matmul rate"))
    peer = {"tiny": tiny, "work": decode}
    found.append(Case("transformers", 3, "transformers", peer, WHOLE_S, "we: 1.2x"))
    climb, options = {"prompt_tokens": 16, "output_tokens": 4, "trials": 1}, dict(SLOWEST)
    for label, change, theirs in LADDER:
        options = options | change
        arguments = {"model": "gpt-oss-20b", "work": climb, "precision": {}, "options": options}
        found.append(Case(f"ladder: {label}", 3, "model", arguments, 90, f"A100: {theirs}"))
    return found


def run_job(job: str, arguments: Figures) -> Figures:
    """A case, in its own process."""
    from benchmarks import gpu_cases, gpu_models, gpu_races

    jobs = {
        "linear": gpu_cases.linear_case,
        "attention": gpu_cases.attention_case,
        "experts": gpu_cases.experts_case,
        "step": gpu_cases.step_case,
        "race": gpu_races.race,
        "linear race": gpu_races.linear_race,
        "attention race": gpu_races.attention_race,
        "ceilings": gpu_cases.ceilings,
        "model": gpu_models.model,
        "transformers": gpu_models.transformers,
    }
    if job == "torch":
        from benchmarks import gpu_torch

        jobs[job] = gpu_torch.weight_only
    return jobs[job](**arguments)


def work(given: list[Figures]) -> None:
    """A process: a line on stdout for each of its cases, as soon as it is known."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no line
    for case in given:
        begin = time.perf_counter()
        try:
            line: Figures = {"result": run_job(case["job"], case["arguments"])}
        except Exception as error:
            said = " ".join(str(error).split())[:400]
            line = {"failed": f"{type(error).__name__}: {said}"}
        line = {"name": case["name"], "seconds": round(time.perf_counter() - begin, 1), **line}
        if case["job"] not in PEERS:
            from rooflax.bench.environment import environment

            line["environment"] = environment()
        out.write(json.dumps(line) + "\n")
        out.flush()


PEERS = ("transformers", "torch")
HAS_XLA = ("linear", "attention", "experts", "model")


def started(given: list[Case], limit_s: float, environment: dict[str, str]) -> list[Figures]:
    """Lines of cases that share a process; of those it did not come to, why."""
    tasks = [asdict(case) for case in given]
    for task in tasks:
        task["arguments"].setdefault("implementation", None)
    own = {**environment, **given[0].environment}
    command = [sys.executable, __file__, "--work", json.dumps(tasks)]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = process.communicate(timeout=limit_s)
        why = (errors.strip().splitlines() or ["no reason given"])[-1][:400]
        why = f"ended with {process.returncode}: {why}"
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        why = f"not done after {limit_s:.0f} s"
    lines = [json.loads(line) for line in said.splitlines()]
    spent = round(time.perf_counter() - begin, 1)
    rest = given[len(lines) :]
    return lines + [{"name": case.name, "seconds": spent, "failed": why} for case in rest]


def with_xla(case: Case) -> Case:
    return replace(case, arguments={**case.arguments, "implementation": "xla"})


def run_part(given: list[Case], budget_s: float, out: Path, together: bool, own: Any) -> None:
    """Cases one after the other, or all in one process, each with a line in OUT/figures.jsonl."""
    begun = time.perf_counter()
    about = {case.name: case for case in given}
    queue = [given] if together else [[case] for case in given]

    def left() -> float:
        return budget_s - (time.perf_counter() - begun)

    def written(line: Figures) -> None:
        case = about[line["name"]]
        line |= {"part": case.part, "target": case.target}
        with (out / "figures.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        state = line.get("failed") or f"done{' with XLA' if 'fell_back' in line else ''}"
        sys.stderr.write(f"{line['seconds']:6.1f} s  {line['name']}: {state}\n")

    while queue:
        group = queue.pop(0)
        if left() < 5:
            for case in group:
                written({"name": case.name, "seconds": 0, "failed": "no time was left"})
            continue
        limit = min(sum(case.limit_s for case in group), left())
        lines = started(group, limit, own)
        failed = [about[line["name"]] for line in lines if "failed" in line]
        again = [with_xla(case) for case in failed if case.job in HAS_XLA]
        why = {line["name"]: line.get("failed") for line in lines}
        for line in lines:
            written(line)
        if again and left() > 5:
            limit = min(sum(case.limit_s for case in again), left())
            for line in started(again, limit, own):
                written(line | {"fell_back": why[line["name"]]})


def markdown(lines: list[Figures]) -> str:
    """A table of every case's last line."""
    last = {line["name"]: line for line in lines}
    first = next((f["environment"] for f in last.values() if "environment" in f), None)
    about = "nothing ran"
    if first:
        about = f"{first['device']}, JAX {first['jax']}, Python {first['python']}, {first['date']}"
    table = [
        "# GPU figures", "", about, "",
        "| case | decode tok/s | share | prefill tok/s | share | GB/s | wanted | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for line in last.values():
        cells = [line.get("failed") or "", "", "", "", ""]
        if result := line.get("result"):
            cells = []
            for kind in ("decode", "prefill"):
                speed, share = (result.get(f"{kind}_{k}") for k in ("tok_per_s", "roofline"))
                cells.append(f"{speed['median']:.1f}" if speed else "")
                cells.append(f"{share:.0%}" if isinstance(share, float) else "")
            rate = result.get("read_gb_per_s") or result.get("copy_gb_per_s")
            cells.append(f"{rate:.0f}" if isinstance(rate, float) else "")
        name = line["name"] + (" (XLA: the kernel failed)" if "fell_back" in line else "")
        table.append(f"| {name} | {' | '.join(cells)} | {line['target']} | {line['seconds']} |")
    return "\n".join(table) + "\n"


def environment(out: Path, dry: bool, packages: Path | None) -> dict[str, str]:
    """Of every case: one cache of programs, and the compiler that JAX would not find."""
    own = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(out.resolve() / "cache")}
    if dry:
        own["JAX_PLATFORMS"] = "cpu"
    elif nvcc := shutil.which("nvcc"):
        own.setdefault("CUDA_ROOT", str(Path(nvcc).resolve().parents[1]))
    if packages:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), own.get("PYTHONPATH")]))
    return own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--part", type=int, choices=sorted(BUDGETS_S))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--budget", type=float, metavar="SECONDS")
    parser.add_argument("--packages", type=Path, help="a folder with transformers in it")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return 0
    if args.out is None:
        parser.error("OUT is missing: the folder for figures.jsonl and table.md.")
    known = cases(args.dry_run)
    chosen = [c for c in known if not args.only or any(c.name.startswith(o) for o in args.only)]
    if not chosen:
        parser.error(f"--only names none of the cases: {', '.join(c.name for c in known)}.")
    parts = [args.part] if args.part else sorted(BUDGETS_S)
    if not args.part and not args.only and not args.dry_run:
        parser.error("--part is missing: 1, then 2, then 3.")
    args.out.mkdir(parents=True, exist_ok=True)
    own = environment(args.out, args.dry_run, args.packages)
    for part in parts:
        given = [case for case in chosen if case.part == part]
        if given:
            budget = BUDGETS_S[part] if args.budget is None else args.budget
            run_part(given, budget, args.out, args.dry_run, own)
    lines = [json.loads(line) for line in (args.out / "figures.jsonl").read_text().splitlines()]
    (args.out / "table.md").write_text(markdown(lines))
    sys.stdout.write(markdown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
