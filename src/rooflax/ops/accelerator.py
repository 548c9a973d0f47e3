"""Pallas kernels: on which platform they run, and which of them runs here.

GPU kernels are Mosaic GPU's, for Hopper, and need JAX 0.11 or later; TPU kernels run on every JAX
supported.
"""

from __future__ import annotations

import jax

from rooflax.ops import format_names, tiles

OLDEST_GPU_JAX = (0, 11)
HOPPER = "9."


def platform() -> str:
    """The platform of this process's devices: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def block_size() -> int:
    """Tokens per block of the KV cache here."""
    return tiles.block_size(platform())


def prefill_chunk() -> int:
    """The most tokens of one prompt in a step here, if the caller does not say how many."""
    return tiles.prefill_chunk(platform())


def cache_width(head_dim: int) -> int:
    """Elements that a token's head takes in the KV cache here."""
    return tiles.cache_width(head_dim, platform())


def readable(format: str | None, fits: bool = True) -> str | None:
    """A weight's format if it `fits` the weight and kernels here read it; None otherwise."""
    reads = format is not None and fits and format_names.is_read(platform(), format)
    return format if reads else None


def stored_format(format: str) -> str:
    """The format here of a weight that was packed in a format."""
    return format_names.stored_format_on(platform(), format)


def mixes_formats() -> bool:
    """Whether layers may differ in format here, and the tensors of a fused weight."""
    return format_names.mixes_formats(platform())


def rounded_format() -> str:
    """The format here of a checkpoint's codes that no kernel reads."""
    return format_names.rounded_format(platform())


def capability() -> str | None:
    """Compute capability of the first device, as NVIDIA counts ("9.0"); None if unknown."""
    return getattr(jax.devices()[0], "compute_capability", None)


def missing() -> str | None:
    """Reason why Pallas kernels cannot run here; None if they can."""
    here = platform()
    if here == "gpu" and jax.__version_info__ < OLDEST_GPU_JAX:
        return f"GPU kernels need JAX 0.11 or later, and this is {jax.__version__}"
    if here == "gpu" and not (chip := capability() or HOPPER).startswith(HOPPER):
        return f"GPU kernels are for Hopper (compute capability 9), and this GPU has {chip}"
    if here not in ("gpu", "tpu"):
        return f"Pallas kernels are for GPU and TPU, and JAX runs on {here}"
    return None
