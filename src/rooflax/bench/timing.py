"""Timing of device work: a call is over when its result is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def best_of(function: Callable[..., Any], *args: Any, repeats: int = 3) -> float:
    """The shortest of `repeats` awaited calls, seconds; the caller has warmed them up."""
    return min(timed(function, *args) for _ in range(repeats))


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds from the call to its awaited result."""
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start
