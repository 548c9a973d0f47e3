"""The main jobs in one process, as a user starts it; prints one JSON document.

    python -m tests.support.product.as_users

tests/conftest.py sets XLA flags that make programs quick to compile, and checks shapes; here is
neither.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable

from rooflax import load
from rooflax.cli.main import main
from rooflax.ops import native
from tests.chunks import assert_same_bits


def command(*argv: str, stdin: str = "") -> dict[str, object]:
    """What `rooflax ARGV` prints, and its exit status."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    sys.stdin = before
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def bits(quantize: str) -> dict[str, str]:
    """Why the logits differ; nothing where they are the same, or no native kernel is here."""
    if not native.is_ready():
        return {"skipped": native.status().reason or ""}
    try:
        assert_same_bits(load("preset:qwen2.5-tiny", quantize=quantize))
    except AssertionError:
        return {"failed": traceback.format_exc()}
    return {}


GREEDY = ("--temp", "0")
JOBS: dict[str, Callable[[], object]] = {
    "flags": lambda: os.environ.get("XLA_FLAGS"),
    "generate": lambda: command(
        "generate", "-p", "def add(a, b):", "-n", "12", *GREEDY, "--json"
    ),
    "chat": lambda: command("chat", *GREEDY, "-n", "40", stdin="What does len do?\n"),
    "bench": lambda: command(
        "bench", "preset:gpt2-tiny", "--prompt-tokens", "9", "--output-tokens", "5",
        "--trials", "2", "--json",
    ),
    "int8": lambda: bits("int8"),
    "int4": lambda: bits("int4"),
}  # fmt: skip

if __name__ == "__main__":
    json.dump({name: job() for name, job in JOBS.items()}, sys.stdout)
