"""Pallas kernels: on which platform they run, and which of them runs here.

GPU kernels are Mosaic GPU's, for Hopper, and need JAX 0.11 or later; TPU kernels run on every JAX
supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

OLDEST_GPU_JAX = (0, 11)
HOPPER = "9."


def platform() -> str:
    """The platform of this process's devices: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def capability() -> str | None:
    """What the first device computes, as NVIDIA counts ("9.0"); None where it does not say."""
    return getattr(jax.devices()[0], "compute_capability", None)


def missing() -> str | None:
    """Why Pallas kernels cannot run here; None if they can."""
    here = platform()
    if here == "gpu" and jax.__version_info__ < OLDEST_GPU_JAX:
        return f"GPU kernels need JAX 0.11 or later, and this is {jax.__version__}"
    if here == "gpu" and not (found := capability() or HOPPER).startswith(HOPPER):
        return f"GPU kernels are for Hopper (compute capability 9), and this GPU has {found}"
    if here not in ("gpu", "tpu"):
        return f"Pallas kernels run on a GPU or a TPU, and the platform here is {here}"
    return None


def per_platform(operation: str, **kernels: Callable[..., Any]) -> Callable[..., Any]:
    """One implementation of several platforms'.

    Args:
        kernels: by the platform's name.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        here = platform()
        if here not in kernels:
            raise NotImplementedError(f"{operation} has no Pallas kernel for {here}.")
        return kernels[here](*args, **kwargs)

    return run
