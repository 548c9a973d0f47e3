"""Folders of rooflax's own files: the compile cache, and the history."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ROOFLAX_CACHE_DIR"


def cache_folder() -> Path:
    """$ROOFLAX_CACHE_DIR, else rooflax in the user's cache folder."""
    stated = os.environ.get(CACHE_VARIABLE)
    if stated:
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rooflax"


def state_folder() -> Path:
    """rooflax in $XDG_STATE_HOME, else in the user's state folder: what chats remember."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "rooflax"
