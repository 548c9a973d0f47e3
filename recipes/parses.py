"""A task for GRPO with a reward that can be verified: Python that parses.

    python recipes/parses.py data FOLDER     # train.jsonl, valid.jsonl
    python recipes/parses.py run FOLDER      # the same, three runs with other seeds, and their curve

A prompt is the first line of a function. The reward of a completion is the share of its complete
lines up to which it parses: an indentation that does not fit, or a bracket or text that is never
closed, costs every line from there on.
"""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

NAMES = ("read", "write", "find", "parse", "join", "count", "load", "check", "update", "merge")
THINGS = ("file", "line", "node", "value", "item", "name", "path", "key", "token", "group")
ARGUMENTS = ("self", "x", "data, size", "name, default=None", "items", "self, value", "path, mode")
VALID = 32
SEEDS = (0, 1, 2)
FLAGS = (
    "--train-mode", "grpo", "--num-generations", "16", "--max-completion-length", "40", "--batch",
    "64", "--seq-len", "72", "--learning-rate", "1e-4", "--steps", "40", "--eval-every", "10",
)  # fmt: skip


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Per completion the share of its complete lines that parse behind its prompt."""
    return [parsing(prompt, one) for prompt, one in zip(prompts, completions, strict=True)]


def parsing(prompt: str, completion: str) -> float:
    lines = completion.split("\n")[:-1]
    for count in range(len(lines), 0, -1):
        if parses(prompt + "\n".join(lines[:count])):
            return count / len(lines)
    return 0.0


def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in strings, which do parse
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def prompts() -> list[str]:
    made = [
        f"def {verb}_{thing}({arguments}):\n"
        for verb in NAMES
        for thing in THINGS
        for arguments in ARGUMENTS
    ]
    random.Random(0).shuffle(made)
    return made


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = prompts()
    for name, part in (("train", made[VALID:]), ("valid", made[:VALID])):
        lines = (json.dumps({"prompt": prompt}) for prompt in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(made) - VALID} prompts to train on and {VALID} held out are in {folder}")


def train(folder: Path, seed: int) -> Path:
    """The folder of one run."""
    run = folder / f"seed-{seed}"
    command = [
        sys.executable, "-P", "-m", "rooflax", "train", "--data", str(folder), "--out", str(run),
        "--reward", f"{Path(__file__)}:reward", "--seed", str(seed), *FLAGS,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return run


def read(run: Path) -> list[dict]:
    """The lines of a run's log that have a reward."""
    text = (run / "log.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "reward" in line]


def draw(runs: list[Path], path: Path) -> None:
    """The rewards of runs over their steps as a picture; needs matplotlib."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for index, run in enumerate(runs):
        lines = read(run)
        for key, style in (("loss", {"alpha": 0.4}), ("held_out_loss", {"marker": "o"})):
            points = [(line["step"], line["reward"]) for line in lines if key in line]
            label = f"{run.name}, held out" if key == "held_out_loss" else None
            axes.plot(*zip(*points, strict=True), color=f"C{index}", label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("share of lines that parse")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("data", "run"):
        raise SystemExit(__doc__)
    folder = Path(sys.argv[2])
    write_data(folder)
    if sys.argv[1] == "run":
        runs = [train(folder, seed) for seed in SEEDS]
        draw(runs, folder / "reward.svg")
        for run in runs:
            first, *_, last = [line["reward"] for line in read(run) if "held_out_loss" in line]
            print(f"{run}: held-out reward {first:.2f} to {last:.2f}")
            if last <= first:
                raise SystemExit(f"the held-out reward of {run} did not rise")


if __name__ == "__main__":
    main()
