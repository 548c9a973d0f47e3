"""The document of `bench --json`: put together, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from rooflax.bench.statistics import MIN_PAIRS, unpaired_ratio
from rooflax.errors import RequestError

NEEDED = (
    "model", "batch", "prompt_tokens", "output_tokens", "options", "precision", "tokens",
    "prefill_tok_per_s", "decode_tok_per_s",
)  # fmt: skip


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
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; {wanted}") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is not JSON; {wanted}") from None
    if not isinstance(found, dict) or not isinstance(found.get("results"), list):
        raise RequestError(f"{path} has no results; {wanted}")
    for row in found["results"]:
        missing = [n for n in NEEDED if not isinstance(row, dict) or n not in row]
        if missing:
            raise RequestError(f"{path} has a row without {missing[0]!r}; {wanted}")
    return found
