"""Memory of this process and this machine, from the kernel. Linux; unknown elsewhere."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, within the limits of the cgroup and of the
    process's address space (`ulimit -v`); None if unknown."""
    meminfo = _field(Path("/proc/meminfo"), "MemAvailable")
    if meminfo is None:
        return None
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        meminfo = min(meminfo, max(limit - used, 0))
    limit, used = _address_space_limit(), _field(Path("/proc/self/status"), "VmSize")
    if limit is not None and used is not None:
        meminfo = min(meminfo, max(limit - used, 0))
    return meminfo


def anonymous_bytes() -> int | None:
    """RssAnon: memory of this process that is not a file's pages."""
    return _field(Path("/proc/self/status"), "RssAnon")


def rss_bytes() -> int | None:
    """VmRSS: what this process has resident, mapped files included."""
    return _field(Path("/proc/self/status"), "VmRSS")


def peak_rss_bytes() -> int | None:
    """VmHWM: the most this process has had resident, mapped files included."""
    return _field(Path("/proc/self/status"), "VmHWM")


def give_back_freed() -> None:
    """Returns to the system what was freed, where the C library can (glibc's malloc_trim).

    glibc keeps freed pages; after loading or compiling those are a tenth of a small model.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class AnonymousPeak:
    """Samples RssAnon in a thread while a `with` block runs; `peak` is the most it saw."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.peak = 0

    def __enter__(self) -> AnonymousPeak:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes() or 0)
            if self._stop.wait(0.002):
                return


def _field(path: Path, name: str) -> int | None:
    """A line "Name:  123 kB" of a proc file, in bytes."""
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _address_space_limit() -> int | None:
    import resource  # not everywhere

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup_number(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
