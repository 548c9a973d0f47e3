"""The small JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file; CheckpointError if it is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value
