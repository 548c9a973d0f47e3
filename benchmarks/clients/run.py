"""Unmodified clients against the server: installs each in an environment of its own, and runs it.

`python benchmarks/clients/run.py [CLIENT ...] [--folder build/clients] [--write]`
They ask the embedded chat model and a scripted engine, which calls a function for certain. What
passed is printed, and with --write is put into docs/server.md. Exits with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CASES, PAGE = Path(__file__).parent / "cases", ROOT / "docs" / "server.md"
sys.path.insert(0, str(ROOT))
from rooflax import LLM, AsyncLLM  # noqa: E402
from rooflax.models.presets import CHAT_NAME  # noqa: E402
from tests.support.server.live import ScriptedLLM, serving  # noqa: E402

CLIENTS = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "openai-agents": ["openai-agents"],
    "litellm": ["litellm"],
    "langchain-openai": ["langchain-openai"],
    "pydantic-ai": ["pydantic-ai-slim[openai]"],
    "instructor": ["instructor"],
    "llm": ["llm"],
    "lm-eval": ["lm-eval[api]", "transformers"],
    "schemathesis": ["schemathesis"],
    "node": ["openai", "ai", "@ai-sdk/openai-compatible", "zod"],
}
"""Each with what is installed for it: from PyPI, or for node from npm."""
BEGIN, END = "<!-- clients -->\n", "<!-- /clients -->\n"
CASE_S = 600
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The variables by which cases find both."""
    scripted = ScriptedLLM(LLM(CHAT_NAME))
    decode = scripted.llm.tokenizer.decode

    def script(prompt: list[int], params: Any, index: int) -> list[int]:
        text = decode(prompt, skip_special_tokens=False)
        said = "Hello, world."
        if "12 degrees" in text:
            said = "It is 12 degrees."
        elif "get_weather" in text:
            said = CALL
        return scripted.says(said)(prompt, params, index)

    scripted.script = script
    with (
        serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4)) as model,
        serving(lambda _: scripted) as other,
    ):
        folder = str(scripted.llm.tokenizer.folder)
        yield {
            "MODEL_URL": model.url, "SCRIPTED_URL": other.url, "MODEL_NAME": CHAT_NAME,
            "MODEL_FOLDER": folder,
        }  # fmt: skip


def install(name: str, folder: Path) -> list[str]:
    """The command that runs the client's cases; installs what is not there.

    Raises:
        subprocess.CalledProcessError: that failed.
    """
    place, wanted = folder / name, CLIENTS[name]
    if name == "node":
        if not (place / "node_modules").exists():
            place.mkdir(parents=True, exist_ok=True)
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(["npm", "install", *quiet, *wanted], cwd=place, check=True)
        shutil.copy(CASES / "node.mjs", place / "cases.mjs")  # it looks for packages beside itself
        return ["node", str(place / "cases.mjs")]
    python = place / "bin" / "python3"
    if not python.exists():
        venv.create(place, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
    # Not with the folder of the cases first, whose files have the names of the clients.
    path = str(CASES / f"{name}.py")
    code = f"import sys, runpy; sys.path.append({str(CASES)!r}); runpy.run_path({path!r})"
    return [str(python), "-P", "-c", code]


def version(name: str, folder: Path) -> str:
    """Of the client that is installed."""
    place = folder / name
    if name == "node":
        packages = [place / "node_modules" / part / "package.json" for part in ("openai", "ai")]
        return ", ".join(json.loads(path.read_text())["version"] for path in packages)
    package = re.split(r"[\[<>=]", CLIENTS[name][0])[0]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(place / "bin" / "python3"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_client(name: str, folder: Path, where: dict[str, str]) -> dict[str, Any]:
    """A row of the table."""
    try:
        command = install(name, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"client": name, "version": "", "cases": [], "why": f"not installed: {error}"}
    keys = {"OPENAI_API_KEY": "any", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    try:
        done = subprocess.run(
            command, env=os.environ | where | keys, capture_output=True, text=True, timeout=CASE_S
        )
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        out, err = "", f"it took more than {CASE_S} s"
    lines = [line.removeprefix("CASE ") for line in out.splitlines() if line[:5] == "CASE "]
    cases = [json.loads(line) for line in lines]
    if not cases or any(case["why"] for case in cases):
        print(err[-3000:], file=sys.stderr)
    why = None if cases else err.strip().splitlines()[-1:]
    return {"client": name, "version": version(name, folder), "cases": cases, "why": why}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| client | version | passed | not passed |", "| --- | --- | --- | --- |"]
    for row in rows:
        passed = [case["case"] for case in row["cases"] if not case["why"]]
        failed = [
            f"{c['case']}: {' '.join(c['why'].split())[:120]}" for c in row["cases"] if c["why"]
        ]
        failed += [str(row["why"])] if row["why"] else []
        cells = [row["client"], row["version"], ", ".join(passed), "; ".join(failed) or "none"]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", metavar="CLIENT", nargs="*", choices=[*CLIENTS, []])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--write", action="store_true", help="put the table into docs/server.md")
    args = parser.parse_args()
    names = args.clients or [n for n in CLIENTS if n != "node" or shutil.which("npm")]
    with servers() as where:
        rows = []
        for name in names:
            rows.append(run_client(name, args.folder.resolve(), where))
            print(table(rows)[-1], flush=True)
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        text = before + BEGIN + "\n".join(table(rows)) + "\n" + END + after
        PAGE.write_text(text, encoding="utf-8")
    return int(any(row["why"] or any(case["why"] for case in row["cases"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
