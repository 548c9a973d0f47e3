"""Starts our own Python processes, isolated from the current folder and ended with us; rejects
work in a process that was forked.

Every child comes from here; a test rejects a module that imports `subprocess` itself.
"""

from __future__ import annotations

import contextlib
import os
import site
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from rooflax.errors import RequestError

__all__ = [
    "DEVNULL",
    "PIPE",
    "Popen",
    "TimeoutExpired",
    "check_not_forked",
    "check_started_alike",
    "run",
    "start",
    "take_huge_pages",
]

_first_user: int | None = None
"""The process that used a device first."""


def check_not_forked() -> None:
    """Called before a device is used. Of a process, fork copies the thread that calls it and none
    of XLA's, so that a child would wait for them without end.

    Raises:
        RequestError: a parent has used its devices before it forked this process.
    """
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise RequestError(
            "This process was forked from one that had used its devices, whose threads it lacks; "
            'start it by multiprocessing\'s "spawn", and an LLM that is passed to it opens again.'
        )


def check_started_alike(
    rank: int, facts: Mapping[str, Any], other: int, others: Mapping[str, Any]
) -> None:
    """Compares what two processes of one job were started with.

    Args:
        facts: JSON values by name, of process `rank`; `others` are those of process `other`.

    Raises:
        RequestError: naming the first fact that differs.
    """
    for name, value in facts.items():
        if others.get(name) != value:
            raise RequestError(
                f"{name} is {value!r:.80} in process {rank} and {others.get(name)!r:.80} in "
                f"process {other}; start all processes of a job alike."
            )


def start(
    module: str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    lifeline: bool = True,
    **pipes: Any,
) -> Popen[Any]:
    """Starts `python -P -m module`, whose standard streams are UTF-8.

    Args:
        environment: in place of ours.
        options: further ones of the interpreter.
        lifeline: the child gets SIGTERM when this process is gone or drops the returned object,
            however it ended; not on Windows. One that ends with its stdin needs none.
        pipes: arguments of Popen.
    """
    command = [sys.executable, "-P", "-X", "utf8", *options, "-m"]
    variables = _isolated(os.environ if environment is None else environment)
    if not lifeline or os.name != "posix":
        return Popen([*command, module, *arguments], env=variables, **pipes)
    read, write = os.pipe()
    try:
        child: Popen[Any] = Popen(
            [*command, "rooflax.child", str(read), module, *arguments],
            env=variables,
            pass_fds=(read,),
            **pipes,
        )
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    weakref.finalize(child, os.close, write)
    return child


def run(
    module: str,
    arguments: Sequence[str] = (),
    *,
    stdin: str,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a child to its end and captures what it prints.

    Args:
        stdin: the text of its stdin.

    Raises:
        TimeoutExpired: it was killed after `timeout_s`.
    """
    child = start(
        module,
        arguments,
        environment=environment,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        encoding="utf-8",
        errors="replace",
    )
    with child:
        try:
            out, err = child.communicate(stdin, timeout=timeout_s)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _isolated(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose PYTHONPATH names no current folder, and names rooflax's where it must.

    An empty entry means the current folder to Python, as "." does; one that is written out stays.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [entry for entry in entries if os.path.normpath(entry) != os.curdir]
    home = str(Path(__file__).resolve().parents[1])
    if home in map(os.path.realpath, sys.path) and home not in _installed():
        folders.append(home)  # a script or PYTHONPATH brought us here, so the child needs it too
    variables = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return variables | ({"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))} if folders else {})


def _installed() -> set[str]:
    """Folders that every interpreter of this environment searches by itself."""
    folders = site.getsitepackages()
    with contextlib.suppress(TypeError):  # no user folder can be named
        folders.append(site.getusersitepackages())
    return {os.path.realpath(folder) for folder in folders}


def take_huge_pages() -> None:
    """Starts this process again with a C library that asks for huge pages, on Linux.

    The temporaries of a training step are new memory to the system each time. Page by page of 4 KiB
    that takes a fifth of the step of an adapter. The C library reads how it asks for memory when it
    starts, and then alone.
    """
    if "GLIBC_TUNABLES" in os.environ:
        return
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
        if "[madvise]" in modes and os.confstr("CS_GNU_LIBC_VERSION"):
            environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
            os.execve(sys.executable, sys.orig_argv, environment)
    except (OSError, ValueError):
        return  # it is slower, and right
