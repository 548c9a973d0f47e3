"""The small files of a checkpoint folder: regular ones of a limited size, most of them JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.files import read_regular, reject_stand_in

MAX_FILE_BYTES = 64 << 20
"""Bytes of a file that is read whole; the largest index of a checkpoint has about 20 MB."""
ADAPTER = "adapter_config.json"


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes | None:
    """The bytes of a file; None where there is none.

    Raises:
        CheckpointError: it is no regular file (a pipe would block, a device never end), has more
            than `most` bytes, or cannot be read.
    """
    try:
        return read_regular(path, most)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_json(path: Path, data: bytes) -> Any:
    """The JSON in a file's bytes.

    Raises:
        CheckpointError: it is not JSON, with the place.
    """
    reject_stand_in(path, data)
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # int's advice on its limit of digits follows one
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise CheckpointError(f"{path} is not JSON: {reason}.") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file.

    Raises:
        CheckpointError: it is not one, or `read_file` rejects the file.
    """
    data = read_file(path)
    if data is None:
        return {}
    value = parse_json(path, data)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is a {type(value).__name__}, not a JSON object.")
    return value


def read_config_json(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        UnsupportedModelError: the folder holds an adapter.
        CheckpointError: there is none, or `read_json_object` rejects it.
    """
    if (folder / ADAPTER).is_file():
        raise UnsupportedModelError(
            f"{folder} holds an adapter ({ADAPTER}), which is no model; name its base model, and "
            f"give the adapter as `lora`."
        )
    path = folder / "config.json"
    if not os.path.lexists(path):
        inside = sorted(other.parent for other in folder.glob("*/config.json"))
        adapters = sorted(other.parent for other in folder.glob(f"*/{ADAPTER}"))
        hint = f"name {inside[0]}, which has one" if inside else "a checkpoint needs one"
        if adapters and not inside:
            hint = f"name the base model of the adapter {adapters[0]}, and give that as `lora`"
        raise CheckpointError(f"{folder} has no config.json; {hint}.")
    return read_json_object(path)
