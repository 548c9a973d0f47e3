"""Memory that models can take on the default device."""

from __future__ import annotations

import jax

from rooflax.nn.host_memory import available_bytes


def free_bytes(num_devices: int = 1) -> int | None:
    """Free bytes of each device; None if unknown.

    Args:
        num_devices: of a mesh; CPU devices share the host's memory.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        available = available_bytes()
        here = max(1, num_devices // jax.process_count())
        return None if available is None else available // here
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
