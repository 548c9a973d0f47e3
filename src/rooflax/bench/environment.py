"""Hardware and versions, for the head of a report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import Any

import jax

import rooflax
from rooflax.nn.host_memory import available_bytes
from rooflax.ops import native


def environment() -> dict[str, Any]:
    """Environment of a measurement: versions, hardware and flags."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rooflax": rooflax.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": processor(),
        "threads": native.num_threads(),
        "device": f"{device.platform}: {device.device_kind}",
        "num_devices": jax.device_count(),
        "memory_available_bytes": available_bytes(),
        **machine_state(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def machine_state() -> dict[str, Any]:
    """State of the machine at this moment: load, other processes and clock rate."""
    return {"load_average": round(os.getloadavg()[0], 2), "clock_mhz": clock_mhz()}


def processor() -> str:
    """The processor and, where it computes, which of its instructions the native kernels use."""
    name, kernels = cpu_name(), native.status()
    if jax.default_backend() != "cpu":
        return name
    return f"{name} ({kernels.reason if kernels.ready else 'without native kernels'})"


def cpu_name() -> str:
    """The processor as the kernel names it."""
    return native.cpuinfo("model name") or platform.processor() or platform.machine()


def clock_mhz() -> float | None:
    """The first core's clock right now, where the kernel says it."""
    value = native.cpuinfo("cpu MHz")
    return float(value) if value else None
