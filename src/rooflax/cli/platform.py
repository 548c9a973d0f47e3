"""What must be settled before JAX starts: platform and threads; and the mesh right after.

Importing this module imports no jax.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

from rooflax.cli.flags import PLATFORMS
from rooflax.errors import RequestError

THREADS_VARIABLE = "PJRT_NPROC"


def settle(args: argparse.Namespace) -> None:
    """Applies --platform and --threads to this process and to those it starts; imports no jax.

    Raises:
        RequestError: no platform has that name.
    """
    platform = args.platform
    if platform is not None and platform not in PLATFORMS:
        raise RequestError(f"--platform is {platform!r}; it must be one of {', '.join(PLATFORMS)}.")
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = _jax_platforms(platform)
    if args.threads is not None:
        os.environ[THREADS_VARIABLE] = str(args.threads)
    os.environ.setdefault(THREADS_VARIABLE, str(default_threads()))


def start_jax(args: argparse.Namespace) -> Any:
    """Applies --platform and --threads, imports jax, and makes sure the platform is there.

    Returns:
        The jax module.

    Raises:
        RequestError: no such platform here.
    """
    settle(args)
    import jax

    platform = args.platform

    try:
        found = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # an assertion: no named platform is there
        wanted = platform or os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split())[:200] or "JAX finds none"
        raise RequestError(f"the platform {wanted!r} is not here: {reason}") from None
    if platform is not None and found != platform:
        raise RequestError(f"the platform {platform!r} is not here: JAX runs on {found!r}.")
    return jax


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


def make_mesh(text: str | None) -> Any:
    """The mesh that --mesh asks for, None without it.

    Raises:
        RequestError: there are not that many devices.
    """
    if text is None:
        return None
    from rooflax.nn.mesh import make_mesh

    return make_mesh(text)
