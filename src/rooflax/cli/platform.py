"""Platform, threads and mesh, which must be set before JAX starts or right after.

Importing this module imports no jax.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooflax.errors import RequestError
from rooflax.nn.execution import PLATFORMS
from rooflax.signals import interrupts_end_at_once

THREADS_VARIABLE = "PJRT_NPROC"
COORDINATOR_VARIABLE = "JAX_COORDINATOR_ADDRESS"
COUNT_VARIABLE, NUMBER_VARIABLE = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LEADER_VARIABLE = "LWS_LEADER_ADDRESS"
"""Kubernetes' LeaderWorkerSet names each group's processes with variables of its own."""
OF_LEADER_WORKER_SET = {COUNT_VARIABLE: "LWS_GROUP_SIZE", NUMBER_VARIABLE: "LWS_WORKER_INDEX"}
LEADER_PORT = 8476
JOIN_S = 120
"""Seconds that a process waits for the others of its job."""
LOST_S = 15
"""Seconds of silence after which a process is lost, and the others end."""
LOST_SAID = b"JAX distributed service detected fatal errors"
LOST = b"rooflax: another process of the job was lost, so this one ends.\n"
MOST_SAID_BYTES = 1 << 16
THREADS_PER_PROCESSOR = 16
"""The most that --threads takes: with very many, XLA does nothing but start them."""


def settle(args: argparse.Namespace) -> None:
    """Applies --platform and --threads to this process and to those it starts; imports no jax.

    Raises:
        RequestError: no platform has that name, or there are too many threads.
    """
    platform = args.platform
    if platform is not None and platform not in PLATFORMS:
        raise RequestError(f"--platform is {platform!r}; it must be one of {', '.join(PLATFORMS)}.")
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = _jax_platforms(platform)
    if args.threads is not None:
        most = THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
        if args.threads > most:
            raise RequestError(
                f"--threads is {args.threads:,}; on this machine it is at most {most:,}, "
                f"{THREADS_PER_PROCESSOR} for each processor."
            )
        os.environ[THREADS_VARIABLE] = str(args.threads)
    os.environ.setdefault(THREADS_VARIABLE, str(default_threads()))


NATIVE = ("ml_dtypes", "jax.numpy", "tokenizers")
"""Modules with libraries of their own that every verb with a model imports."""


PLUGINS = {
    "gpu": ("cuda13", ("jax_cuda13_plugin", "jax_cuda12_plugin")),
    "tpu": ("tpu", ("libtpu",)),
}
"""By platform JAX's extra, and the modules of which it brings one."""


def start_jax(args: argparse.Namespace) -> Any:
    """Applies --platform and --threads, imports jax, and makes sure the platform is there.

    Returns:
        The jax module.

    Raises:
        RequestError: no such platform here.
    """
    settle(args)
    with interrupts_end_at_once():
        import jax

        for native in NATIVE:
            importlib.import_module(native)
    platform = args.platform
    join_processes(args)
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # an assertion: no named platform is there
        wanted = platform or os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())[:200] or "JAX finds none"
        raise RequestError(f"the platform {wanted!r} is not here: {reason}") from None
    if platform is not None and backend != platform:
        missing = _missing_plugin(platform)
        raise RequestError(
            f"the platform {platform!r} is not here: JAX runs on {backend!r}{missing}."
        )
    return jax


def _missing_plugin(platform: str) -> str:
    """End of a sentence about a platform for which JAX has no plugin here."""
    extra, plugins = PLUGINS.get(platform, ("", ()))
    if not extra or any(importlib.util.find_spec(name) for name in plugins):
        return ""
    return f", and its plugin is not installed (pip install 'jax[{extra}]')"


def _jax_platforms(platform: str) -> str:
    """JAX's name of a platform; "gpu" alone would ask for CUDA and ROCm both."""
    if platform == "cpu":
        return "cpu"
    if platform == "gpu":
        spec = importlib.util.find_spec("jax_plugins")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        plugins = [entry.name for folder in folders for entry in Path(folder).iterdir()]
        platform = "rocm" if any("rocm" in name for name in plugins) else "cuda"
    return f"{platform},cpu"


def default_threads() -> int:
    """Cores that this process may use: its affinity mask, within its cgroup's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    quota = cgroup_cores(Path("/sys/fs/cgroup"))
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cgroup_cores(folder: Path) -> float | None:
    """CPU time per time that a cgroup allows, in cores; None if it sets no limit."""
    try:  # version 2: "200000 100000" or "max 100000"
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def check_processes(args: argparse.Namespace) -> None:
    """
    Raises:
        RequestError: the flags of several processes do not fit together.
    """
    coordinator = getattr(args, "coordinator", None)
    count, number = getattr(args, "num_processes", None), getattr(args, "process_id", None)
    if coordinator is None and (count is not None or number is not None):
        raise RequestError("--num-processes and --process-id need --coordinator HOST:PORT.")
    if coordinator is None:
        return
    host, colon, port = coordinator.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit():
        raise RequestError(f"--coordinator is {coordinator!r}; it must be HOST:PORT.")
    if count is not None and number is not None and number >= count:
        raise RequestError(
            f"--process-id is {number} of --num-processes {count}; it must be 0 to {count - 1}."
        )


def names_job(args: argparse.Namespace) -> bool:
    """Whether flags, JAX's own variables or a LeaderWorkerSet's name a job of several processes.

    Those of a LeaderWorkerSet become JAX's.
    """
    if not hasattr(args, "coordinator"):
        return False
    leader, size = os.environ.get(LEADER_VARIABLE), os.environ.get("LWS_GROUP_SIZE", "1")
    if leader and size != "1" and not (args.coordinator or COORDINATOR_VARIABLE in os.environ):
        os.environ[COORDINATOR_VARIABLE] = f"{leader}:{LEADER_PORT}"
        for name, theirs in OF_LEADER_WORKER_SET.items():
            if theirs in os.environ:
                os.environ.setdefault(name, os.environ[theirs])
    return bool(args.coordinator or os.environ.get(COORDINATOR_VARIABLE))


def join_processes(args: argparse.Namespace) -> None:
    """Joins the job of several processes, if flags or variables name one, once.

    All but the first are silent from then on. When another is lost, this one ends.

    Raises:
        RequestError: the others were not found.
    """
    check_processes(args)
    if not names_job(args):
        return
    # Of what a lost process makes of the others' connections, one sentence is enough.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    if jax.distributed.is_initialized():
        return
    named = args.coordinator

    numbers = {"num_processes": args.num_processes, "process_id": args.process_id}
    for name, variable in (("num_processes", COUNT_VARIABLE), ("process_id", NUMBER_VARIABLE)):
        text = os.environ.get(variable)
        if numbers[name] is None and text is not None:
            if not (text.isascii() and text.isdigit()):
                raise RequestError(f"{variable} is {text!r}; it must be a whole number.")
            numbers[name] = int(text)
    try:
        jax.distributed.initialize(
            named,
            **numbers,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=LOST_S,
            shutdown_timeout_seconds=2 * LOST_S,  # of one that ends before the others
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"the job's processes did not come together: {reason}") from None
    silent = open(os.devnull, "w")  # noqa: SIM115
    our_stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(silent.fileno(), 1)  # Gloo says there whom it has met
    _explain_aborts()
    if jax.process_index() > 0:
        args.quiet = True
    sys.stdout = silent if jax.process_index() > 0 else our_stdout


@contextlib.contextmanager
def ends_with_its_job() -> Iterator[None]:
    """While inside, an exchange that fails because a process is lost waits for JAX's own client,
    which ends this one with a sentence."""
    try:
        yield
    except Exception as error:
        import jax

        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(2 * LOST_S)
        raise


def _explain_aborts() -> None:
    """Lets this process end with one sentence when another one is lost.

    JAX's client then aborts the process, behind a page of C++. What C++ says goes to a file of
    memory, and to stderr only if the process aborts for another reason.
    """
    if not hasattr(os, "memfd_create"):
        return
    ours = os.dup(2)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(ours), "w", buffering=1, errors="backslashreplace")
    aside = os.memfd_create("stderr")
    os.dup2(aside, 2)

    def abort(number: int) -> None:
        said = os.pread(aside, MOST_SAID_BYTES, 0)
        if LOST_SAID in said:
            os.write(ours, LOST)
            os._exit(1)
        os.write(ours, said)

    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(abort)
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


_on_abort: Any = None
"""The handler, which must outlive its registration."""


def make_mesh(text: str | None) -> Any:
    """The mesh that --mesh asks for, None without it.

    Raises:
        RequestError: there are not that many devices.
    """
    if text is None:
        return None
    from rooflax.nn.mesh import make_mesh

    return make_mesh(text)
