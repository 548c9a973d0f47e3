"""Exit codes, help without jax, and what happens when the outside world goes away."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys

import pytest

from rooflax.__main__ import entry
from rooflax.cli import models, quantize
from rooflax.cli.main import ELSEWHERE, VERBS, main
from rooflax.errors import CheckpointError, EngineError, RequestError

pytestmark = pytest.mark.oldest_jax

COMMAND = [sys.executable, "-m", "rooflax"]
DIRECT = "import sys; from rooflax.cli.main import main; "


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("that is wrong."), 2, "rooflax: that is wrong.\n"),
        (CheckpointError("the file\nis broken"), 2, "rooflax: the file is broken\n"),
        (EngineError("it broke"), 1, "rooflax: it broke\n"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "No space left on device: x"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("division"), 1, "ZeroDivisionError: division (this is a fault"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_a_failure_is_its_code_and_at_most_one_sentence(rooflax, monkeypatch, error, code, said):
    def fail(args):
        raise error

    monkeypatch.setattr(models, "run", fail)
    ran = rooflax("models")
    assert ran.code == code
    assert said in ran.err
    assert ran.err.count("\n") <= 1
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["frob"], "there is no verb 'frob'"),
        (["pull", "qwen"], "there is no verb 'pull': a hub id is downloaded when it is first used"),
        (["run", "model", "-n", "3"], "there is no verb 'run': a conversation is rooflax chat"),
        (["rm", "x"], "rooflax models --remove ID"),
        (["genrate"], "there is no verb 'genrate' (did you mean generate?); see rooflax --help"),
        (["helo"], "there is no verb 'helo' (did you mean help?); see rooflax --help"),
        (["--versoin"], "there is no flag '--versoin' (did you mean --version?)"),
        (["chat", "-ngl", "99"], "unknown: -ngl (all layers run on the device;"),
        (["chat", "-hf", "a/b"], "unknown: -hf (MODEL is given without a flag); see rooflax chat"),
        (["generate", "--model=x", "-p", "x"], "unknown: --model (MODEL is given without a flag)"),
        (["generate", "--adapter-path", "x"], "unknown: --adapter-path (did you mean --lora?)"),
        (["serve", "--tensor-parallel-size", "2"], "(did you mean --mesh?)"),
        (["generate", "--promt", "x"], "unknown: --promt (did you mean --prompt?)"),
        (["generate", "def f(x):"], "'def f(x):' is no model, and no prompt was given"),
        (["--frob"], "there is no flag '--frob'"),
        (["generate", "--frob"], "unknown: --frob; see rooflax generate --help"),
        (["generate", "-n"], "expected one argument"),
        (["generate", "-n", "many"], "'many' is not a whole number"),
        (["generate", "--temp", "hot"], "'hot' is not a number"),
        (["generate", "--logit-bias", "5"], "'5' is not ID=VALUE"),
        (["generate", "--early-stopping", "True"], "'True' is not one of true, false, never"),
        (["bench", "--compare", "a", "b", "--ignore-config-key", "x"], "--ignore-config-key has"),
        (["bench", "--compare", "a", "b", "--no-cache"], "--no-cache has no meaning"),
        (["generate", "--max"], "unknown: --max"),
        (["generate", "a", "b c"], "unknown: b c (what is to be read follows --prompt); see"),
        (["detokenize", "a", "1"], "unknown: 1 (what is to be read follows --tokens); see"),
        (["inspect", "a", "b"], "unknown: b; see"),
        (["generate", "-p", "x\udcff"], "is not UTF-8"),
        (["generate", "-p", "x", "--quiet", "--verbose"], "contradict"),
        (["train"], "required: --data, --out"),
        (["models", "somewhere"], "unknown: somewhere"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_code_2(rooflax, argv, said):
    ran = rooflax(*argv)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device: out/x"),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2, "out/x cannot be written: a file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "out"), 2, "a file is in the place"),
        (OSError(errno.EPERM, "Operation not permitted"), 1, "rooflax: Operation not permitted\n"),
        (OSError(errno.ENOENT, "No file", "out/.x.0123456789ab.tmp"), 1, "No file: out/x\n"),
        (OSError(errno.ENOENT, "No file", "in/.x.tmp"), 1, "No file: in/.x.tmp\n"),
    ],
)
def test_an_error_of_the_system_names_the_output(rooflax, monkeypatch, error, code, said):
    def fail(args):
        raise error

    monkeypatch.setattr(quantize, "run", fail)
    ran = rooflax("quantize", "model", "-q", "int8", "-o", "out/x")
    assert ran.code == code and said in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize("verb", ELSEWHERE)
def test_verbs_of_others_name_what_there_is_here(rooflax, verb):
    ran = rooflax(verb, "--anything")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    for named in re.findall(r"rooflax (\w+)", ran.err):
        assert named in VERBS


def test_help_and_version(rooflax):
    assert rooflax().out == rooflax("--help").out == rooflax("-h").out
    assert rooflax("-v").out == rooflax("--version").out
    assert rooflax("--version").out.startswith("rooflax 0.")
    assert rooflax("version").out == rooflax("-V").out == rooflax("--version").out
    assert rooflax("help").out == rooflax("--help").out
    assert rooflax("help", "bench").out == rooflax("bench", "--help").out
    for verb in VERBS:
        ran = rooflax(verb, "--help")
        assert ran.code == 0
        assert ran.out.startswith(f"usage: rooflax {verb} ")
        assert max(map(len, ran.out.splitlines())) <= 80


def test_a_platform_without_its_plugin_says_what_to_install(rooflax, monkeypatch):
    monkeypatch.setattr("rooflax.cli.platform.PLUGINS", {"gpu": ("cuda13", ("no_such_plugin",))})
    assert "(pip install 'jax[cuda13]')" in rooflax("doctor", "--platform", "gpu").err
    monkeypatch.setattr("rooflax.cli.platform.PLUGINS", {"gpu": ("cuda13", ("json",))})
    assert "plugin" not in rooflax("doctor", "--platform", "gpu").err


def test_help_imports_no_jax():
    loop = f"[main(a) for v in {VERBS} for a in (['--help'], [v, '--help'])]; "
    check = "assert not {'jax', 'numpy', 'tokenizers'} & set(sys.modules), 'imported'"
    subprocess.run(
        [sys.executable, "-c", DIRECT + loop + check], check=True, stdout=subprocess.DEVNULL
    )


def test_help_takes_less_than_0_3_seconds():
    def cpu_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(3):
        before = cpu_s()
        subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(cpu_s() - before)
    assert min(times) < 0.3


def test_a_reader_that_goes_away_is_no_error():
    for argv in (["--help"], ["models"]):
        with subprocess.Popen(
            [*COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_code_1():
    with open("/dev/full", "wb") as full:
        ran = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 1
    assert ran.stderr == b"rooflax: No space left on device\n"


# A job in the background inherits an ignored SIGINT, which Python then leaves ignored.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rooflax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_sigint_ends_generate_with_130_and_no_traceback():
    argv = ["generate", "preset:gpt2-tiny", "-p", "x", "-c", "256", "--no-cache"]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""


def test_the_console_script_is_entry(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rooflax", "frob"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which it wraps
    with pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 2
    assert main(["--version"]) == 0


def test_standard_streams_that_are_closed_are_nothing(tmp_path):
    """As cron and daemons leave them."""
    rooflax = f'"{sys.executable}" -m rooflax'
    for command, code, said in (
        ("version >&-", 0, ""),
        ("tokenize -p hi >&-", 0, ""),
        ("nonsense 2>&-", 2, ""),
        ("generate --input - --output out.jsonl <&- >&-", 0, ""),
    ):
        ran = subprocess.run(
            ["sh", "-c", f"{rooflax} {command}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (code, said), (command, ran.stderr)
        assert "Traceback" not in ran.stderr


INTERRUPTED_IN = {
    "an import": "with signals.interrupts_end_at_once(): os.kill(os.getpid(), 2); time.sleep(9)",
    "a callback": (
        "signals.keep_interrupts()\n"
        "class Dropped:\n"
        "    def __del__(self): os.kill(os.getpid(), 2); time.sleep(0.1)\n"
        "try:\n"
        "    Dropped()\n"
        "    time.sleep(9)\n"
        "except KeyboardInterrupt:\n"
        "    os._exit(130)"
    ),
}


@pytest.mark.parametrize("place", INTERRUPTED_IN)
def test_an_interrupt_is_not_lost(place):
    # What was started in the background of a shell may ignore it, and so would its children.
    heeds = "import os, signal, time\nsignal.signal(2, signal.default_int_handler)\n"
    code = f"{heeds}from rooflax import signals\n{INTERRUPTED_IN[place]}"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (130, "")
