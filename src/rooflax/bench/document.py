"""The document of `bench --json`: put together, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rooflax.bench.figures import MIN_PAIRS, unpaired_ratio
from rooflax.errors import RequestError
from rooflax.files import read_regular

MOST_TRIALS = 10_000
SLOWEST, FASTEST = 1e-9, 1e15
"""Tokens per second outside of which a figure is none."""


def document(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of rows that were measured apart; the roofline is the median reading.

    Shares are computed with the readings around each trial, not with this one.
    """
    results = [row["result"] for row in measured]
    readings = [c[when] for r in results for c in r["ceilings"] for when in ("before", "after")]
    return {
        "environment": measured[0]["environment"],
        "roofline": {
            "read_gb_per_s": median(c["read_gb_per_s"] for c in readings),
            "flops_per_s": median(c["flops_per_s"] for c in readings),
            "source": readings[0]["source"],
            "buffer_bytes": min(c["buffer_bytes"] for c in readings),
        },
        "results": results,
    }


def with_cost(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A deterministic row with what determinism costs: its decode speed over the plain row's."""
    speeds = [r["result"]["decode_tok_per_s"]["trials"] for r in (plain, row)]
    if min(map(len, speeds)) < MIN_PAIRS:
        cost: dict[str, Any] = {"ratio": median(speeds[1]) / median(speeds[0])}
    else:
        cost = unpaired_ratio(*speeds).as_json()
    return {**row, "result": {**row["result"], "deterministic_over_plain": cost}}


def read_document(path: Path) -> dict[str, Any]:
    """A document that was saved.

    Raises:
        RequestError: there is none, or it is something else.
    """
    wanted = "give a document of rooflax bench --json"
    try:
        document = json.loads(read_regular(path))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; {wanted}") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is not JSON; {wanted}") from None
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise RequestError(f"{path} has no results; {wanted}")
    for row in document["results"]:
        for name, is_one in READ.items():
            if not isinstance(row, dict) or name not in row:
                raise RequestError(f"{path} has a row without {name!r}; {wanted}")
            if not is_one(row[name]):
                raise RequestError(f"{path} has a row whose {name!r} is none; {wanted}")
    return document


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_settings(value: Any) -> bool:
    """Names with what they are set to, all of it fit for a line of text."""
    return isinstance(value, dict) and all(
        _is_text(name) and (setting is None or type(setting) in (bool, int) or _is_text(setting))
        for name, setting in value.items()
    )


def _is_speed(value: Any) -> bool:
    """A summary whose trials can be compared."""
    trials = value.get("trials") if isinstance(value, dict) else None
    if not isinstance(trials, list) or len(trials) > MOST_TRIALS:
        return False
    return all(type(t) in (int, float) and SLOWEST < t < FASTEST for t in trials)


def _is_tokens(value: Any) -> bool:
    """A list of ids per row of the batch."""
    return isinstance(value, list) and all(
        isinstance(row, list) and all(type(token) is int for token in row) for row in value
    )


READ: dict[str, Callable[[Any], bool]] = {
    "model": _is_text,
    "batch": _is_count,
    "prompt_tokens": _is_count,
    "output_tokens": _is_count,
    "options": _is_settings,
    "precision": _is_settings,
    "tokens": _is_tokens,
    "prefill_tok_per_s": _is_speed,
    "decode_tok_per_s": _is_speed,
}
"""The fields of a row that a comparison reads, and what they must be."""
