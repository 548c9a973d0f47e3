"""The package's native library (csrc/), opened once; absent where it could not be built."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "librooflax_native.so"


def library_path() -> Path | None:
    """Where the library was installed; None where the package was installed without a compiler.

    An editable install keeps it apart from the sources: every folder of the package is looked at.
    """
    package = find_spec("rooflax")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "native" / LIBRARY
        if path.is_file():
            return path
    return None


@cache
def load() -> ctypes.CDLL | None:
    """The opened library; None where there is none, or this system cannot open it."""
    path = library_path()
    try:
        return ctypes.CDLL(str(path)) if path else None
    except OSError:
        return None
