"""Commands in environments that few developers have: other locales, no home, narrow terminals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from rooflax.loading.model_info import embedded_folder

pytestmark = pytest.mark.oldest_jax

SCRIPT = """
import contextlib, io, sys
from rooflax.cli.main import main

def run(*argv, stdin=b""):
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    return main(argv)

bad, out = sys.argv[1:]
tiny = ("preset:qwen2.5-tiny", "-n", "2", "--temp", "0")
codes = [
    run("--help"), run("generate", "--help"), run("models"), run("inspect"),
    run("generate", *tiny, "-p", "caf\\u00e9 \\U0001f600"), run("generate", *tiny, stdin=b"piped"),
    run("chat", "--system", "Be brief.", "-n", "2", stdin="h\\u00e9llo\\n/bye\\n".encode()),
    run("tokenize", "-p", "\\u4f60"), run("quantize", "-q", "int8", "-o", out),
]
wrong = [
    run("generate", *tiny, stdin=b"\\xff\\xfe\\x00binary"), run("generate", *tiny, stdin=b""),
    run("generate", bad, "-p", "x"), run("generate", *tiny, "-p", "x", "--top-p", "7"),
    run("generate", *tiny, "-p", "x", "-c", "99999999"), run("chat", stdin=b"\\xff\\n"),
]
print(codes, wrong, file=sys.stderr)
if codes != [0] * len(codes) or wrong != [2] * len(wrong):
    sys.exit(9)
"""
ENVIRONMENTS = {
    "a dumb and narrow terminal": ((), {"TERM": "dumb", "COLUMNS": "20", "NO_COLOR": "1"}),
    "ASCII": ((), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "optimized": (("-O",), {}),
    "no home": ((), {"HOME": None, "XDG_CACHE_HOME": None, "ROOFLAX_CACHE_DIR": None}),
    "a home that cannot be": (
        (),
        {"HOME": "/dev/null/x", "XDG_CACHE_HOME": None, "ROOFLAX_CACHE_DIR": None},
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_commands_work_and_mistakes_are_sentences(tmp_path, name):
    flags, changes = ENVIRONMENTS[name]
    bad = shutil.copytree(embedded_folder(), tmp_path / "bad", copy_function=shutil.copyfile)
    os.truncate(bad / "model.safetensors", 1000)
    env = {name: v for name, v in (os.environ | changes).items() if v is not None}
    command = [sys.executable, *flags, "-c", SCRIPT, bad, tmp_path / "out"]
    ran = subprocess.run(command, env=env, capture_output=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")[-3000:]
    assert b"Traceback" not in ran.stderr and b"\x1b" not in ran.stdout


POINTS = {
    "loading": ("rooflax.loading.safetensors", "SafetensorsFile.read"),
    "compiling": ("rooflax.engine.runner", "Runner.warm"),
    "prefill and decoding": ("rooflax.engine.runner", "Runner.run"),
}
HOOK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from importlib import import_module
from rooflax.cli.main import main

module, where = sys.argv[1:3]
owner, name = where.split(".")
owner = getattr(import_module(module), owner)
real, sent = getattr(owner, name), []

def hooked(*args, **kwargs):
    if not sent:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **kwargs)

setattr(owner, name, hooked)
code = main(sys.argv[3:])
assert sent and time.monotonic() - sent[0] < 1, "it went on"
sys.exit(code)
"""


@pytest.mark.parametrize("point", POINTS)
def test_ctrl_c_ends_it_within_a_second(point):
    argv = ["generate", "-p", "import", "-n", "4"]
    command = [sys.executable, "-c", HOOK, *POINTS[point], *argv]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (130, b"")


def test_a_reader_that_leaves_while_text_is_written_is_no_error():
    command = [sys.executable, "-m", "rooflax", "generate", "preset:qwen2.5-tiny", "-p", "x"]
    command += ["-n", "400", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 0
