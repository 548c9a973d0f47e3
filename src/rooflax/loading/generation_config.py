"""A checkpoint's own defaults for generation, and every id that ends a sequence.

Reads `generation_config.json`, and `eos_token_id` of `config.json` where the former is silent. It
does not sample: what a request leaves open is filled from here elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.fields.kinds import Number, is_number, is_whole
from rooflax.fields.sampling import MAX_INT32 as MAX_NUMBER
from rooflax.fields.sampling import OF_CHECKPOINT, SAMPLING
from rooflax.loading.json_files import read_json_object


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint recommends; None where it says nothing.

    `do_sample` false or absent means greedy in transformers' `generate`. The fields here are what
    the file says, whatever `do_sample` is: a caller who wants the reference's behaviour takes
    `greedy`.

    Attributes:
        sampling: values of fields of `SamplingParams` that a checkpoint may state.
        do_sample: None if absent.
        eos_token_ids: every id that ends a sequence, in the file's order.
        bos_token_id: the id that begins a sequence.
        pad_token_id: the id that fills batches.
        max_new_tokens: the file's limit of new tokens.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
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
        sampling=given.sampling(),
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

    def sampling(self) -> dict[str, float]:
        found = {}
        for name in OF_CHECKPOINT:
            kind = SAMPLING[name].checkpoint
            value = self.number(name, kind) if isinstance(kind, Number) else self.count(name)
            if value is not None:
                found[name] = value
        return found

    def number(self, name: str, kind: Number) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not is_number(value):
            raise self._bad(name, "a finite number")
        if not kind.holds(value):
            raise self._bad(name, kind.range)
        return float(value)

    def count(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        # Some files write -1 for a pad token that does not exist.
        if name == "pad_token_id" and value == -1:
            return None
        if not is_whole(value, int) or not 0 <= value <= MAX_NUMBER:
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
