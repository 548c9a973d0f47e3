"""rooflax beside other engines, on the same checkpoints.

    python benchmarks/peers/compare.py [--quick] [--models gpt2,qwen2.5-0.5b] [--out FILE.json]
    python benchmarks/peers/compare.py --jobs serving

Every engine has a process of its own, which is stopped while another one works. Each job is taken
in rounds, one trial of each engine in turn, every other round in the opposite order, with the
ceilings of the machine read right before and after each trial. Writes the trials as JSON and,
beside it, the table as Markdown with a plot of the ratios. A peer that is not installed is listed
as missing; README.md says how to install them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plan
from engine_process import EngineFailed, EngineProcess, rounded, timed
from plan import OURS, PEERS, Job
from prepare import Installation, Unavailable
from serving import Serving

HERE = Path(__file__).parent
MODELS = (*plan.MODELS, *plan.FAMILIES, *plan.PUBLISHED)
SLOW, SLOW_ROUNDS = 3.0, 2
"""A peer that takes SLOW times as long as the quickest one in the first round, in all that becomes
a row, cannot be the best one, and is timed in SLOW_ROUNDS rounds."""


@dataclass
class Column:
    """One engine's side of a job.

    Attributes:
        opened: what its driver said when it was ready.
        rounds: how many it takes part in.
        trials: `prefill_s`, `decode_s`, and the ceilings `before` and `after`.
    """

    engine: EngineProcess
    opened: dict[str, Any]
    rounds: int
    trials: list[dict[str, Any]] = field(default_factory=list)


STOPPED = "stopped before the last job"
"""Problem of a run that was ended from outside."""


class Comparison:
    """A run of the whole plan.

    Attributes:
        jobs: one entry per model, width and shape of work, as the document has them.
        serving: one per model and kind of arrivals.
        problems: what could not be measured, a sentence each.
        about: per engine what it said of itself, or why it is missing.
        installed: the engines that take part.
    """

    def __init__(self, at: Installation, args: argparse.Namespace):
        self.at, self.args = at, args
        self.jobs: list[dict[str, Any]] = []
        self.serving: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.about: dict[str, Any] = {}
        self.installed = [OURS]
        for name in PEERS:
            if name in args.engines and at.has(name):
                self.installed.append(name)
            else:
                self.about[name] = "not installed" if name in args.engines else "left out"

    def run(self) -> None:
        for model in self.args.models:
            if "batches" in self.args.jobs:
                for width in plan.widths_of(model, self.args.widths):
                    self._batches(model, width)
            if "serving" in self.args.jobs and plan.SERVED.get(model) in self.args.widths:
                self._serve(model, plan.SERVED[model])

    def _batches(self, model: str, width: str) -> None:
        names = [name for name in self.installed if width in plan.FORMATS[name]]
        engines = self._start(model, width, names)
        try:
            for job in self.args.shapes:
                self._compare(model, width, job, engines)
        finally:
            for engine in engines:
                engine.close()

    def _serve(self, model: str, width: str) -> None:
        """Two processes of ours measure the parts of the ideal time."""
        peers = [name for name in (plan.SERVING_PEER,) if name in self.installed]
        engines = self._start(model, width, [OURS, *peers, *[OURS] * len(plan.PARTS)])
        try:
            if len(engines) == 1 + len(peers) + len(plan.PARTS):
                what = f"{model} {width}, serving"
                server = Serving(what, engines, peers, self.args.rounds, self._problem)
                head = {"model": model, "width": width}
                for found in server.run():
                    self.serving.append(head | found)
        except EngineFailed as error:
            self._problem(f"{model} {width}, serving: {error}")
        finally:
            for engine in engines:
                engine.close()

    def _start(self, model: str, width: str, names: Sequence[str]) -> list[EngineProcess]:
        """These engines, loaded and stopped."""
        started = []
        for name in names:
            try:
                command = self.at.command(name, model, width, self.args.threads)
                log = self.at.files / f"{name}.log"
                started.append(EngineProcess(name, command, self._environment(), log))
                self.about.setdefault(name, started[-1].about)
            except (Unavailable, EngineFailed) as error:
                self._problem(f"{model} {width}: {error}")
        return started

    def _environment(self) -> dict[str, str]:
        threads = str(self.args.threads)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PJRT_NPROC": threads}

    def _compare(self, model: str, width: str, job: Job, engines: list[EngineProcess]) -> None:
        began = time.perf_counter()
        columns = self._open(f"{model} {width} {job.name}", job, engines)
        ours = next((c for c in columns if c.engine.name == OURS), None)
        if ours is None:  # there is nothing to compare, nor a count of bytes
            return
        own = (ours.opened["dtype"],)
        of_peers = plan.PEERS_MULTIPLY.get(width, own)
        reads = {each: reader(ours.opened, each) for each in {own, of_peers}}
        for number in range(self.args.rounds):
            order = columns if number % 2 == 0 else columns[::-1]
            for column in [c for c in order if number < c.rounds]:
                try:
                    read = reads[own if column is ours else of_peers]
                    column.trials.append(trial(column.engine, read, [c.engine for c in columns]))
                except EngineFailed as error:
                    self._problem(f"{model} {width} {job.name}: {error}")
                    engines.remove(column.engine)
                    columns = [c for c in columns if c is not column]
                    column.engine.close()
            if number == 0:
                excuse_the_slow(job, columns)
        if ours not in columns:
            return
        self.jobs.append(entry(model, width, job, columns))
        took = time.perf_counter() - began
        sys.stderr.write(f"{took:6.1f} s  {model} {width} {job.name}: {speeds(job, columns)}\n")

    def _open(self, what: str, job: Job, engines: list[EngineProcess]) -> list[Column]:
        """Each engine ready for the job and warmed up by it."""
        columns = []
        for engine in list(engines):
            try:
                opened = engine.ask(do="open", **vars(job))
                columns.append(Column(engine, opened, self.args.rounds))
            except EngineFailed as error:
                self._problem(f"{what}: {error}")
                engines.remove(engine)
                engine.close()
        return columns

    def _problem(self, sentence: str) -> None:
        sys.stderr.write(f"problem: {sentence}\n")
        self.problems.append(sentence)


def excuse_the_slow(job: Job, columns: list[Column]) -> None:
    """Fewer rounds for peers that cannot be the best one, by their first trials."""
    peers = [c for c in columns if c.engine.name != OURS]
    parts = [f"{test}_s" for test in job.tests]
    for column in peers:
        if all(column.trials[0][p] > SLOW * min(c.trials[0][p] for c in peers) for p in parts):
            column.rounds = min(SLOW_ROUNDS, column.rounds)


def reader(opened: dict[str, Any], multiplied: tuple[str, ...]) -> Any:
    """Reads the ceilings for what a job reads, and an engine multiplies."""
    from rooflax.bench.ceilings import ceiling_reader

    cost = opened["costs"]["decode"]
    return ceiling_reader(cost["weight_bytes"] + cost["kv_bytes"], *multiplied)


def trial(engine: EngineProcess, read: Any, engines: Sequence[EngineProcess]) -> dict[str, Any]:
    """One timed run between two readings.

    Raises:
        EngineFailed: as `timed`.
    """

    def ask() -> dict[str, Any]:
        before, found, after = read(), engine.ask(do="trial"), read()
        return rounded(found) | {"before": rounded(vars(before)), "after": rounded(vars(after))}

    return timed(engine, engines, ask)


def entry(model: str, width: str, job: Job, columns: list[Column]) -> dict[str, Any]:
    """A job as the document has it."""
    return {
        "model": model,
        "width": width,
        **vars(job),
        "engines": {
            c.engine.name: {
                "format": plan.FORMATS[c.engine.name][width],
                "weights_bytes": (c.opened | c.engine.about).get("weights_bytes"),
                "opened": rounded(c.opened),
                "trials": c.trials,
            }
            for c in columns
            if c.trials
        },
    }


def speeds(job: Job, columns: list[Column]) -> str:
    """The best trial of each, for who waits."""
    part = f"{job.tests[0]}_s"
    tokens = job.batch * (job.new_tokens or job.prompt_tokens)
    found = [
        f"{c.engine.name} {tokens / min(t[part] for t in c.trials):.0f}"
        for c in columns
        if c.trials
    ]
    return ", ".join(found) + " tok/s"


def chosen(args: argparse.Namespace) -> dict[str, list[str]]:
    """Of what flags name a part, that part."""
    whole = {"models": plan.MODELS, "widths": plan.WIDTHS, "engines": PEERS, "jobs": plan.KINDS}
    parts = {flag: [str(name) for name in getattr(args, flag)] for flag in whole}
    return {flag: part for flag, part in parts.items() if part != [str(n) for n in whole[flag]]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="batches 1 and 8, fewer rounds and steps"
    )
    parser.add_argument("--models", type=names_of(MODELS), default=plan.MODELS)
    parser.add_argument("--widths", type=names_of(plan.WIDTHS), default=plan.WIDTHS)
    parser.add_argument("--engines", type=names_of(PEERS), default=PEERS, help="which peers")
    parser.add_argument("--jobs", type=names_of(plan.KINDS), default=plan.KINDS)
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "peers.json")
    parser.add_argument("--render", action="store_true", help="only write the Markdown again")
    folder = HERE.parents[1] / "build" / "peers"
    parser.add_argument("--python", type=Path, help="the peers'; default: what install.sh made")
    parser.add_argument("--export-python", type=Path, help="has optimum-intel")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree")
    parser.add_argument("--files", type=Path, default=folder, help="for what is made, and kept")
    args = parser.parse_args()
    args.python = args.python or folder / "venv" / "bin" / "python"
    args.export_python = args.export_python or folder / "export" / "bin" / "python"
    args.llama_cpp = args.llama_cpp or folder / "llama.cpp"
    args.rounds = args.rounds or (plan.QUICK_ROUNDS if args.quick else plan.ROUNDS)
    batches = args.batches or (plan.QUICK_BATCHES if args.quick else plan.BATCHES)
    args.shapes = plan.jobs(batches, quick=args.quick)
    return args


def names_of(choices: Sequence[str]) -> Any:
    """A parser of comma-separated names."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(choices):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(choices)}")
        return found

    return parse


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The document; of a run that is stopped, with the jobs that were done."""
    from rooflax.bench.environment import environment, machine_state

    at = Installation(args.python, args.export_python, args.llama_cpp, args.files)
    at.files.mkdir(parents=True, exist_ok=True)
    before, start = environment(), time.perf_counter()
    comparison = Comparison(at, args)
    try:
        comparison.run()
    except (KeyboardInterrupt, SystemExit):
        if not comparison.jobs and not comparison.serving:
            raise
        comparison.problems.append(STOPPED)
    return {
        "environment": before,
        "machine_after": machine_state(),
        "seconds": time.perf_counter() - start,
        "settings": {
            "quick": args.quick,
            "batches": args.batches or (),
            "rounds": args.rounds,
            "threads": args.threads,
            "only": chosen(args),
        },
        "engines": comparison.about,
        "problems": comparison.problems,
        "jobs": comparison.jobs,
        "serving": comparison.serving,
    }


def written(document: dict[str, Any]) -> str:
    """JSON with a line per entry of a list."""

    def lines(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value)
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"

    parts = [f"{json.dumps(name)}: {lines(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stopped engines are ended, too
    os.environ["PJRT_NPROC"] = str(args.threads)  # how many threads read the ceilings
    if args.render:
        document = json.loads(args.out.read_text(encoding="utf-8"))
    else:
        document = measured(args)
    from peers_plot import plot
    from peers_report import rendered, with_rows

    document = with_rows(document)
    args.out.write_text(written(document), encoding="utf-8")
    picture = plot(document)
    if picture is not None:
        args.out.with_suffix(".svg").write_text(picture, encoding="utf-8")
    page = rendered(document, args.out.with_suffix(".svg").name if picture else None)
    args.out.with_suffix(".md").write_text(page, encoding="utf-8")
    sys.stdout.write(page)
    if STOPPED in document["problems"] and not args.render:
        sys.exit(143)


if __name__ == "__main__":
    main()
