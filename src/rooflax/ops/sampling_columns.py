"""Sampler inputs of a sequence as one row of int32: its columns, and how to write and read them.

Floats are there by their bits. The rows of all slots stay on the device; the native sampler reads
them as they are (csrc/sample.h, `SamplingRow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rooflax.fields.sampling import MAX_ALLOWED_IDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, SAMPLING

NO_ID = -1
"""Pads the lists of ids; those of the bias are padded with a bias of 0."""


def _columns(kind: str) -> tuple[str, ...]:
    return tuple(name for name, one in SAMPLING.items() if one.column == kind)


FLOATS = _columns("float")
UNSIGNED = (*_columns("unsigned"), "sample_index")
INTS = (*_columns("int"), "num_logprobs", "min_position", "scores_adjusted", "is_masked")
SCALARS = (*FLOATS, *UNSIGNED, *INTS)
OFF = dict.fromkeys(SCALARS, 0) | {"num_logprobs": -1} | {
    name: one.off_value for name, one in SAMPLING.items() if one.column
}  # fmt: skip
"""Greedy, and every filter off."""
WIDTHS = (
    len(FLOATS), len(UNSIGNED), len(INTS),
    MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_ALLOWED_IDS, MAX_STOP_IDS,
)  # fmt: skip
WIDTH = sum(WIDTHS)


def split(columns: Any) -> list[Any]:
    """A NumPy or JAX array's last axis, by what it holds: floats, unsigned, ints, ids and values of
    the bias, allowed ids, stop ids."""
    ends = np.cumsum(WIDTHS)
    return [columns[..., end - n : end] for end, n in zip(ends, WIDTHS, strict=True)]


def empty(slots: int) -> np.ndarray:
    """Greedy, and every filter off."""
    columns = np.zeros((slots, WIDTH), np.int32)
    if slots:
        write(columns[0], {}, {}, (), ())
    columns[:] = columns[:1]
    return columns


def write(
    row: np.ndarray,
    scalars: Mapping[str, Any],
    bias: Mapping[int, float],
    allowed_ids: Iterable[int],
    stop_ids: Iterable[int],
) -> None:
    """Fills one row.

    Args:
        scalars: of SCALARS; those left out are off.
    """
    scalars = OFF | dict(scalars)
    floats, unsigned, ints, ids, values, allowed, stop = split(row)
    floats.view(np.float32)[:] = [scalars[name] for name in FLOATS]
    unsigned.view(np.uint32)[:] = [scalars[name] for name in UNSIGNED]
    ints[:] = [scalars[name] for name in INTS]
    ids[:], values[:], allowed[:], stop[:] = 0, 0, NO_ID, NO_ID
    ids[: len(bias)] = list(bias)
    values.view(np.float32)[: len(bias)] = list(bias.values())
    for columns, token_ids in ((allowed, tuple(allowed_ids)), (stop, tuple(stop_ids))):
        columns[: len(token_ids)] = token_ids
