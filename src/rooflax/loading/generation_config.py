"""A checkpoint's own defaults for generation, and every id that ends a sequence.

Reads `generation_config.json`, and `eos_token_id` of `config.json` where the former is silent. It
does not sample: what a request leaves open is filled from here elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.loading.json_files import read_json_object

MAX_NUMBER = 2**31 - 1
"""Of what the files state in whole numbers, ids and counts alike."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint recommends; None where it says nothing.

    `do_sample` false or absent means greedy in transformers' `generate`. The fields here are what
    the file says, whatever `do_sample` is: a caller who wants the reference's behaviour takes
    `greedy`.

    Attributes:
        temperature: at least 0.
        top_k: how many of the most probable tokens are kept; 0 keeps all.
        top_p: share of the probability kept, in (0, 1].
        min_p: floor relative to the most probable token, in [0, 1].
        repetition_penalty: above 0; 1 changes nothing.
        do_sample: None if absent.
        eos_token_ids: every id that ends a sequence, in the file's order.
        bos_token_id: the id that begins a sequence.
        pad_token_id: the id that fills batches.
        max_new_tokens: the file's limit of new tokens.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    max_new_tokens: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether transformers' `generate` would take the most probable token each time."""
        return not self.do_sample


def read_generation_defaults(
    folder: str | os.PathLike[str], *, tokenizer_eos_id: int | None = None
) -> GenerationDefaults:
    """Reads the defaults of a checkpoint folder; files that are missing say nothing.

    End-of-sequence ids are those of generation_config.json; else of config.json; else the
    tokenizer's.

    Args:
        folder: the checkpoint.
        tokenizer_eos_id: the tokenizer's own end of sequence.

    Raises:
        CheckpointError: a file is not a JSON object, or a value has the wrong type or range.
    """
    path, config = (Path(folder) / name for name in ("generation_config.json", "config.json"))
    values = read_json_object(path)
    eos = _Fields(path, values).ids("eos_token_id")
    eos = eos or _Fields(config, read_json_object(config)).ids("eos_token_id")
    if not eos and tokenizer_eos_id is not None:
        eos = (tokenizer_eos_id,)
    return replace(generation_defaults(values, path), eos_token_ids=eos)


def generation_defaults(values: Mapping[str, Any], where: Path) -> GenerationDefaults:
    """The defaults that an object like generation_config.json states, checked.

    Args:
        where: the file that errors name.

    Raises:
        CheckpointError: a value has the wrong type or range.
    """
    given = _Fields(where, values)
    return GenerationDefaults(
        temperature=given.number("temperature", low=0.0),
        top_k=given.count("top_k"),
        top_p=given.number("top_p", above=0.0, high=1.0),
        min_p=given.number("min_p", low=0.0, high=1.0),
        repetition_penalty=given.number("repetition_penalty", above=0.0),
        do_sample=given.flag("do_sample"),
        eos_token_ids=given.ids("eos_token_id"),
        bos_token_id=given.count("bos_token_id"),
        pad_token_id=given.count("pad_token_id"),
        max_new_tokens=given.count("max_new_tokens"),
    )


class _Fields:
    """One JSON object whose values are taken with their checks."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def _bad(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {self.values[name]!r:.60}, not {wanted}.")

    def number(
        self,
        name: str,
        *,
        low: float = -math.inf,
        above: float = -math.inf,
        high: float = math.inf,
    ) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        # A whole number may be too large for a float.
        numeric = type(value) is float or (type(value) is int and abs(value) <= MAX_NUMBER)
        if not numeric or not math.isfinite(value):
            raise self._bad(name, "a finite number")
        if not (low <= value <= high and value > above):
            least = f"at least {low:g}" if math.isfinite(low) else f"above {above:g}"
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise self._bad(name, f"{least}{most}")
        return float(value)

    def count(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        # Some files write -1 for a pad token that does not exist.
        if name == "pad_token_id" and value == -1:
            return None
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            raise self._bad(name, f"a whole number of at least 0 and at most {MAX_NUMBER}")
        return value

    def flag(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i <= MAX_NUMBER for i in ids):
            raise self._bad(name, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))
