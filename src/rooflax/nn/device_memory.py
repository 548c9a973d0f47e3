"""Memory that models can take on the default device."""

from __future__ import annotations

import jax

from rooflax.nn.host_memory import available_bytes


def free_bytes() -> int | None:
    """What is free: of the host for the CPU backend, of the device elsewhere; None if unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return available_bytes()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
