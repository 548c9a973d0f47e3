"""The persistent compile cache, and counting what was compiled.

Programs are kept in the user's cache folder. The key is the program, jaxlib's version, the flags
and the device, so another checkpoint of the same shape, a moved checkout or an edited comment
compiles nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.monitoring

from rooflax.folders import cache_folder
from rooflax.ops.kernels import chosen

MISS = "/jax/compilation_cache/cache_misses"
HIT = "/jax/compilation_cache/cache_hits"
REQUEST = "/jax/core/compile/backend_compile_duration"

LOOP_EMITTERS = "xla_cpu_use_fusion_emitters"


def compiler_options(kernels: str | None) -> dict[str, bool] | None:
    """Compiler options for XLA; None for its defaults.

    Where native kernels do the work, the older emitters of loops compile the small rest in a fifth
    to a half less time with 60 MB less, and it runs as fast. JAX 0.11 no longer has them.

    Args:
        kernels: as in `ExecutionOptions`.
    """
    has_them = jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu"
    if not has_them or chosen(kernels)["linear"] != "native":
        return None
    return None if LOOP_EMITTERS in os.environ.get("XLA_FLAGS", "") else {LOOP_EMITTERS: False}


def enable_persistent_cache() -> Path | None:
    """Keeps compiled programs across processes, unless the caller has configured that already.

    Returns:
        The folder; None where it cannot be written, and then nothing is kept.
    """
    if _configured_folder() is not None:
        return _configured_folder()
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def persistent_cache_is_on() -> bool:
    """Whether compiled programs are kept."""
    return bool(jax.config.values["jax_enable_compilation_cache"]) and bool(_configured_folder())


def _configured_folder() -> Path | None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    return Path(folder) if folder else None


@dataclass(eq=False)
class CompileCounts:
    """Counts of what was compiled.

    Attributes:
        cache_misses, cache_hits: of the persistent cache.
        requests: every program asked of the backend, cache hits included.
        seconds: spent on those requests.
    """

    cache_misses: int = 0
    cache_hits: int = 0
    requests: int = 0
    seconds: float = 0.0

    @property
    def compilations(self) -> int:
        """Cache misses; every request when the cache is off."""
        return self.cache_misses if persistent_cache_is_on() else self.requests


_active: list[CompileCounts] = []
_listening = False


@contextlib.contextmanager
def count_compilations(into: CompileCounts | None = None) -> Iterator[CompileCounts]:
    """Counts compilations of this process until the block ends, on top of `into` if given."""
    _listen()
    counts = CompileCounts() if into is None else into
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


def _listen() -> None:
    """Registers the listeners once: jax.monitoring keeps them for the life of the process."""
    global _listening
    if _listening:
        return
    _listening = True
    jax.monitoring.register_event_listener(_on_event)
    jax.monitoring.register_event_duration_secs_listener(_on_duration)


def _on_event(event: str, **_: object) -> None:
    for counts in _active:
        if event == MISS:
            counts.cache_misses += 1
        elif event == HIT:
            counts.cache_hits += 1


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    if event == REQUEST:
        for counts in _active:
            counts.requests += 1
            counts.seconds += duration_secs
