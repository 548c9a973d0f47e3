"""What the persistent compile cache shares, and what it does not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.product.snippets import ROOT

pytestmark = pytest.mark.oldest_jax

SCRIPT = """
import json, os, sys
# PYTHONPATH wins over an editable install's finder.
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import resource
if "MOST_BYTES" in os.environ:  # of a file, as on a disk that is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["MOST_BYTES"]),) * 2)
if "KILLED_AT" in os.environ:
    import signal
    from tests.support.disk import Disk
    class Kill(Disk):
        def touch(self, name):
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                os.kill(os.getpid(), signal.SIGKILL)
    where = os.environ["ROOFLAX_CACHE_DIR"]
    watched = Kill(where, int(os.environ["KILLED_AT"])).watched()
    watched.__enter__()
import rooflax.models.initialize as initialize
initialize.DEVIATION = float(os.environ.get("DEVIATION", "0.02"))
if "JAXLIB" in os.environ:
    import jax._src.cache_key as cache_key
    cache_key.jaxlib_version_str = os.environ["JAXLIB"]
import rooflax
llm = rooflax.LLM("preset:gpt2-tiny")
(done,) = llm.generate([[5, 6, 7]], rooflax.SamplingParams(max_tokens=20, temperature=0))
print(json.dumps({"compilations": done.timings["compilations"], "tokens": done.tokens,
                  "home": rooflax.__file__}))
"""


def run(source: Path, cache: Path, killed_at: int = 0, **env: str) -> dict:
    """Generates in a new process, with the package taken from `source`.

    Args:
        killed_at: the write to the cache, from 1 on, that is the process's last; 0 is none.
    """
    full = {**os.environ, "PYTHONPATH": str(source), "ROOFLAX_CACHE_DIR": str(cache), **env}
    full.pop("JAX_COMPILATION_CACHE_DIR", None)
    if killed_at:
        full |= {"KILLED_AT": str(killed_at), "PYTHONPATH": f"{source}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=full,
        capture_output=True,
        text=True,
        check=not killed_at,
    )
    if done.returncode == -signal.SIGKILL:
        return {}
    result = json.loads(done.stdout) | {"said": done.stderr}
    assert Path(result["home"]).is_relative_to(source)
    return result


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one run of the checkout has filled."""
    folder = tmp_path_factory.mktemp("cache")
    first = run(ROOT / "src", folder)
    assert 1 <= first["compilations"] <= 4
    (folder / "first.json").write_text(json.dumps(first))
    return folder


def test_second_process_compiles_nothing(cache: Path) -> None:
    assert run(ROOT / "src", cache)["compilations"] == 0


def test_moved_checkout_edited_comments_and_other_weights_compile_nothing(
    cache: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "src", moved, ignore=shutil.ignore_patterns("__pycache__"))
    for path in moved.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        first_import = text.find("\nimport ")
        if first_import >= 0:
            text = text[:first_import] + "\n# a comment\n\n" + text[first_import:]
        path.write_text(text, encoding="utf-8")
    again = run(moved, cache, DEVIATION="0.05")
    assert again["compilations"] == 0


def programs(cache: Path) -> list[Path]:
    return [path for path in (cache / "compiled").rglob("*-cache") if path.is_file()]


def tokens_of(cache: Path) -> list[int]:
    """Of the run that filled it."""
    return json.loads((cache / "first.json").read_text())["tokens"]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "other bytes": lambda data: data[:40] + bytes(256) + data[296:],
    "no program": lambda data: b"never a program",
}


@pytest.mark.parametrize(
    "damage",
    [*list(DAMAGES)[:1], *(pytest.param(d, marks=pytest.mark.nightly) for d in list(DAMAGES)[1:])],
)
def test_c13_damaged_programs_are_compiled_again(cache: Path, damage: str) -> None:
    kept = {path: path.read_bytes() for path in programs(cache)}
    wanted = tokens_of(cache)
    try:
        for path, data in kept.items():
            path.write_bytes(DAMAGES[damage](data))
        found = run(ROOT / "src", cache)
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
    assert kept and found["tokens"] == wanted and found["compilations"] >= 1
    assert "Error reading persistent compilation cache" in found["said"]
