"""All figures of a GPU, in parts of at most six, six, ten and ten minutes.

    python benchmarks/gpu.py OUT --part 1     ceilings; kernels, also by other answers: right
                                              first, then how fast; counters of the slowest
    python benchmarks/gpu.py OUT --part 2     whole models, batches and contexts, a peer
    python benchmarks/gpu.py OUT --part 3     races, other kernels and batches, the ladder, peers
    python benchmarks/gpu.py OUT --part 4     models at 4 and 8 layers, prompts of 4,096
    python benchmarks/gpu.py OUT --only NAME ...   some cases of any part, by their whole names
    python benchmarks/gpu.py OUT --dry-run    every part on the CPU, tiny, to see that it works

Each case (`gpu_list.py`) has a limit of its own, and a line of OUT/figures.jsonl as soon as it is
known; what is not written when the time ends is lost. Other answers to the questions that kernels
ask (`ops/block_sizes.py`) have lines of their own, behind the rule's; table.md has those for that
module's table of the faster ones. Shapes of one kernel share a process; one
that fails or is late ends it where the device no longer answers. A case whose kernel fails runs
again with XLA, and its line says so. A later line of a case stands for the earlier ones;
OUT/table.md is made of all. OUT/cache keeps compiled programs and what was autotuned, for all
parts, and OUT/log.txt what the processes say.

Nothing is installed: JAX with its CUDA plugin, optax and tokenizers suffice; torch and transformers
are for the peers. `--packages FOLDER` is where transformers lies if the machine has none.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
sys.path.append(str(ROOT / "benchmarks" / "stand_in"))

from benchmarks.gpu_list import (  # noqa: E402
    BUDGETS_S,
    COUNTED,
    COUNTERS_LIMIT_S,
    COUNTERS_S,
    HAS_XLA,
    PEERS,
    Case,
    Figures,
    cases,
)
from benchmarks.gpu_table import beside_law, markdown  # noqa: E402

START_LIMIT_S = 45
"""What the first case of a process may take besides its own limit."""
KERNELS = ("linear", "attention", "experts", "step")
DRY_S = 3600
"""Of a part on a CPU, whatever else runs there."""
LEAST_S = 5
"""With less than that left no case begins."""


def run_job(job: str, arguments: Figures) -> Iterator[Figures]:
    """Runs a case in its process: its figures, and those of other answers (`with_answers`)."""
    if job == "torch":
        from benchmarks import gpu_torch

        yield gpu_torch.weight_only(**arguments)
        return
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
        "null": gpu_cases.null_kernel,
        "model": gpu_models.model,
        "mixed": gpu_models.mixed,
        "transformers": gpu_models.transformers,
    }
    found = jobs[job](**arguments)
    if isinstance(found, dict):
        yield found
    else:
        yield from found


def lines_of(case: Figures) -> Iterator[Figures]:
    """Runs a case: a line for its figures, for other answers one before and one behind each, and a
    last one; none behind the line of a failure after which the device no longer answers."""
    begin, name = time.perf_counter(), {"name": case["name"]}
    rows = run_job(case["job"], case["arguments"])
    while (row := following(rows)) is not None:
        if answer := row.pop("answer", None):
            name = {"name": f"{case['name']}: {answer}", "rule": case["name"]}
        if answer and not row:
            begin = time.perf_counter()
            yield {**name, "begins": True}
            continue
        state = {"failed": row["failed"]} if "failed" in row else {"result": row}
        line = {**name, "seconds": round(time.perf_counter() - begin, 1), **state}
        if case["job"] not in PEERS:
            from rooflax.bench.environment import environment

            line["environment"] = environment()
            line["ends"] = "failed" in line and not device_answers()
        yield line
        if line.get("ends"):
            return
    yield {"last": True}


def following(rows: Iterator[Figures]) -> Figures | None:
    """The next of a job's rows, or why it has failed."""
    try:
        return next(rows, None)
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        return {"failed": f"{type(error).__name__}: {said}"}


def work() -> None:
    """A process: cases on stdin, for each of them lines on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no line
    for text in sys.stdin:
        for line in lines_of(json.loads(text)):
            out.write(json.dumps(line) + "\n")
            out.flush()


def device_answers() -> bool:
    """Whether it still computes: after an access outside of memory it does not in this process."""
    import jax

    try:
        return int(jax.numpy.arange(4).sum()) == 6
    except jax.errors.JaxRuntimeError:
        return False


class Process:
    """One that works; its first case may take longer."""

    def __init__(self, key: Any, environment: dict[str, str], log: BinaryIO):
        self.key, self.log, self.is_new = key, log, True
        self.began_at = log.seek(0, os.SEEK_END)
        self.popen = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,  # a line that was read ahead would not be selected
            start_new_session=True,  # so that what it has started ends with it
        )

    def lines(self, case: Case, limit_s: float) -> Iterator[Figures]:
        """Runs a case: its line, and one for each other answer.

        A process that is late, ends or has lost its device is ended, and the line of the case or
        the answer that was under way says why.
        """
        until = time.perf_counter() + limit_s
        self.is_new = False
        task = asdict(case)
        task["arguments"].setdefault("implementation", None)
        under_way, begin = {"name": case.name}, time.perf_counter()
        try:
            self.popen.stdin.write(json.dumps(task).encode() + b"\n")
            while said := self.said(until - time.perf_counter()):
                line = json.loads(said)
                if line.pop("last", False):
                    return
                if line.pop("begins", False):
                    under_way, begin = line, time.perf_counter()
                    continue
                if ends := line.pop("ends", False):
                    self.end()
                yield line
                if ends:
                    return
            why = ""
        except BrokenPipeError:
            why = ""
        except TimeoutError:
            why = f"not done after {limit_s:.0f} s"
        why = why or f"ended with {self.popen.wait()}: {self.last_words()}"
        self.end()
        yield {**under_way, "seconds": round(time.perf_counter() - begin, 1), "failed": why}

    def said(self, limit_s: float) -> bytes:
        """Reads a line; nothing where the process has ended.

        Raises:
            TimeoutError: there is none in time.
        """
        if not select.select([self.popen.stdout], [], [], max(0, limit_s))[0]:
            raise TimeoutError
        found = self.popen.stdout.readline()
        return found if found.endswith(b"\n") else b""

    def last_words(self) -> str:
        self.log.seek(self.began_at)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return (lines or ["no reason given"])[-1][:400]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(BrokenPipeError):  # of a case that it did not read
                pipe.close()

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None


def run_part(given: list[Case], budget_s: float, out: Path, own: dict[str, str]) -> None:
    """Cases one after the other, each with a line in OUT/figures.jsonl.

    Args:
        budget_s: beyond the part's own, the cases' limits grow with it.
    """
    begun = time.perf_counter()
    process: Process | None = None

    def left() -> float:
        return budget_s - (time.perf_counter() - begun)

    def run(case: Case) -> Iterator[Figures]:
        nonlocal process
        if process is None or process.key != case.key or not process.is_alive:
            if process is not None:
                process.end()
            process = Process(case.key, joined(own, case.environment), log)
        limit = case.limit_s + (START_LIMIT_S if process.is_new else 0)
        yield from process.lines(case, min(limit * max(1, budget_s / BUDGETS_S[case.part]), left()))

    def written(case: Case, line: Figures) -> None:
        line |= {"part": case.part, "target": case.target}
        line |= {key: case.arguments[key] for key in ("model", "layers") if key in case.arguments}
        with (out / "figures.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        state = line.get("failed") or f"done{' with XLA' if 'fell_back' in line else ''}"
        sys.stderr.write(f"{line['seconds']:6.1f} s  {line['name']}: {state}\n")

    with (out / "log.txt").open("a+b") as log:
        try:
            for case in given:
                if left() < LEAST_S:
                    late = {"name": case.name, "seconds": 0, "failed": "no time was left"}
                    written(case, late)
                    continue
                why = None
                for line in run(case):
                    written(case, line)
                    why = why or ("rule" not in line and line.get("failed"))
                if why and case.job in HAS_XLA and left() > LEAST_S:
                    for line in run(with_xla(case)):
                        written(case, line | {"fell_back": why})
        finally:
            if process is not None:
                process.end()


SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats")


OURS = "regex:_mosaic"
"""What NVIDIA's profiler counts, by the names that Mosaic GPU gives to kernels."""
LOCKED = "ERR_NVGPUCTRPERM"
"""What it says where only an administrator may read the counters."""


def count(given: list[Case], out: Path, own: dict[str, str], left_s: float) -> None:
    """Runs NVIDIA's profiler on the kernels that are slowest beside the law of their speed:
    OUT/counters-N.txt, and a line of OUT/figures.jsonl that says what came of it."""
    ncu = shutil.which("ncu", path=own.get("PATH"))
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    by_name = {case.name: case for case in given}
    slowest = [name for name, _ in beside_law(lines) if name in by_name]
    until = time.perf_counter() + left_s
    for number, name in enumerate(slowest[:COUNTED]):
        begin, path = time.perf_counter(), out / f"counters-{number}.txt"
        if ncu is None:
            why = "ncu is not installed"
        elif until - begin < COUNTERS_S:
            why = "no time was left"
        else:
            why = counted(ncu, by_name[name], path, own, min(COUNTERS_LIMIT_S, until - begin))
        seconds = round(time.perf_counter() - begin, 1)
        state = {"failed": why} if why else {"result": {"counters": path.name}}
        line = {"name": f"counters of {name}", "counted": name, "seconds": seconds, **state}
        with (out / "figures.jsonl").open("a") as file:
            file.write(json.dumps({**line, "part": 1, "target": ""}) + "\n")
        sys.stderr.write(f"{seconds:6.1f} s  {line['name']}: {why or 'done'}\n")
        if LOCKED in why:
            return


def counted(ncu: str, case: Case, path: Path, own: dict[str, str], limit_s: float) -> str:
    """Profiles a case into a file; why there are no counters, or nothing."""
    task = asdict(case)
    task["arguments"] = {**task["arguments"], "implementation": None, "answers": 0}
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = [ncu, "--clock-control", "none", "--target-processes", "all"]
    command += ["--kernel-name", OURS, "--launch-skip", "120", "--launch-count", "8", *sections]
    # counters want plain launches, no graphs
    flags = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    with path.open("w") as file:
        file.write(f"{case.name}\n")
        file.flush()
        popen = subprocess.Popen(
            [*command, sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE, text=True, stdout=file, stderr=subprocess.STDOUT,
            env=joined(own, flags), start_new_session=True,
        )  # fmt: skip
        try:
            popen.communicate(json.dumps(task) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:.0f} s"
        finally:  # what it profiles would hold the card
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
    if LOCKED in path.read_text(errors="replace"):
        return f"the counters are locked ({LOCKED})"
    return f"ended with {popen.returncode}" if popen.returncode else ""


def with_xla(case: Case) -> Case:
    return replace(case, arguments={**case.arguments, "implementation": "xla"})


def joined(own: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Flags of XLA stand behind those that are there."""
    flags = " ".join(filter(None, (each.get("XLA_FLAGS") for each in (own, more))))
    return {**own, **more, **({"XLA_FLAGS": flags} if flags else {})}


def environment(out: Path, dry: bool, packages: Path | None) -> dict[str, str]:
    """Of every case: one cache of programs, and the compiler that JAX would not find."""
    cache, tuned = out.resolve() / "cache", "xla_gpu_per_fusion_autotune_cache_dir"
    (cache / tuned).mkdir(parents=True, exist_ok=True)
    own = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": tuned,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    if dry:
        own["JAX_PLATFORMS"] = "cpu"
    elif (root := cuda_root(own)) is not None:
        own["CUDA_ROOT"] = str(root)
        own["PATH"] = os.pathsep.join([str(root / "bin"), own.get("PATH", "")])
    else:
        sys.stderr.write(
            "No CUDA compiler was found (CUDA_ROOT, nvcc or ptxas in PATH, NVIDIA's "
            "wheels, /usr/local/cuda): kernels will not assemble, and fall back to XLA.\n"
        )
    if packages:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), own.get("PYTHONPATH")]))
    return own


def cuda_root(environment: dict[str, str]) -> Path | None:
    """The folder whose bin/ptxas assembles. JAX 0.11 looks at CUDA_ROOT, then at wheels, of which
    it takes nvidia/cu13 even without a compiler in it."""
    path = environment.get("PATH", "")
    tools = [shutil.which(tool, path=path) for tool in ("nvcc", "ptxas")]
    spec = importlib.util.find_spec("nvidia")
    wheels = list(spec.submodule_search_locations or ()) if spec else []
    places = [
        Path(environment.get("CUDA_ROOT", "")),
        *(Path(tool).resolve().parents[1] for tool in tools if tool),
        *(Path(base) / name for base in wheels for name in ("cu13", "cuda_nvcc")),
        Path("/usr/local/cuda"),
    ]
    return next((place for place in places if (place / "bin" / "ptxas").is_file()), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--part", type=int, choices=sorted(BUDGETS_S))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS",
        help="of a part; beyond its own, limits of cases grow with it",
    )  # fmt: skip
    parser.add_argument("--packages", type=Path, help="a folder with transformers in it")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return 0
    if args.out is None:
        parser.error("OUT is missing: the folder for figures.jsonl and table.md.")
    known = cases(args.dry_run)
    chosen = [c for c in known if not args.only or c.name in args.only]
    if args.only:  # each start of a process takes longer than a kernel
        chosen = [replace(c, process="kernels") if c.job in KERNELS else c for c in chosen]
    if not chosen:
        parser.error(f"--only names none of the cases: {', '.join(c.name for c in known)}.")
    if not args.part and not args.only and not args.dry_run:
        parser.error("--part is missing: 1, then 2; 3 and 4 where there is more time.")
    args.out.mkdir(parents=True, exist_ok=True)
    own = environment(args.out, args.dry_run, args.packages)
    for part in [args.part] if args.part else sorted(BUDGETS_S):
        given = [case for case in chosen if case.part == part]
        if given:
            own_s = DRY_S if args.dry_run else BUDGETS_S[part]
            budget = own_s if args.budget is None else args.budget
            begun = time.perf_counter()
            run_part(given, budget, args.out, own)
            if part == 1:
                count(given, args.out, own, budget - (time.perf_counter() - begun))
    lines = [json.loads(line) for line in (args.out / "figures.jsonl").read_text().splitlines()]
    (args.out / "table.md").write_text(markdown(lines))
    sys.stdout.write(markdown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
