"""Repositories of the hub: which open, and which to take in place of one that does not.

repositories.json is written by tools/repositories.py from published config.json files; the page
docs/models.md shows it as a table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from math import log
from pathlib import Path
from typing import Any

SHOWN = 3
"""Repositories that a sentence names."""
SIZES = (("hidden_size", "n_embd", "dim"), ("num_hidden_layers", "n_layer", "n_layers"),
         ("vocab_size",))  # fmt: skip
"""Names of a model's width, depth and vocabulary in config.json."""
GENERATES = ("CausalLM", "LMHead", "ConditionalGeneration")
"""In the names of classes that generate text."""


@cache
def repositories() -> tuple[dict[str, Any], ...]:
    """The rows of repositories.json.

    Each has `repository`, `family`, `quantization` (None is plain), `sizes` (width, depth and
    vocabulary), `embeds` (it is an encoder), `bytes` (weights and KV cache at 4,096 tokens: "" as
    published, and by what they are quantized to) and `rejected`, the reason why one does not open.
    """
    path = Path(__file__).with_name("repositories.json")
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def sizes_of(raw: Mapping[str, Any]) -> list[int] | None:
    """Width, depth and vocabulary in a config.json, or in its text part; None where one is not
    there."""
    text = raw.get("text_config")
    parts = [text, raw] if isinstance(text, Mapping) else [raw]
    sizes = []
    for names in SIZES:
        stated = [part.get(name) for part in parts for name in names]
        sizes += [size for size in stated if type(size) is int and size > 0][:1]
    return sizes if len(sizes) == len(SIZES) else None


def instead(raw: Mapping[str, Any], families: Collection[str]) -> str:
    """Names repositories that open in place of one that does not: of its sizes, or else, where its
    family is not computed, of about its size.

    Args:
        raw: its config.json.
        families: those that are computed.
    """
    sizes = sizes_of(raw)
    if sizes is None:
        return ""
    opens = [row for row in repositories() if "rejected" not in row and row["sizes"]]
    quantized = any("quantization" in key for key in raw)
    opens.sort(key=lambda row: (row["quantization"] is None) is quantized)
    names = [row["repository"] for row in opens if row["sizes"] == sizes]
    if names:
        return f" Of its sizes open {', '.join(names[:SHOWN])}."
    if raw.get("model_type") in families:
        return ""
    near: dict[str, str] = {}  # one of each family
    embeds = not any(word in str(raw.get("architectures")) for word in GENERATES)
    for row in sorted(opens, key=lambda row: abs(_size(row["sizes"]) - _size(sizes))):
        if row["embeds"] is embeds and row["quantization"] is None:
            near.setdefault(row["family"], row["repository"])
    return f" Of about its size are {', '.join([*near.values()][:SHOWN])}."


def _size(sizes: list[int]) -> float:
    """Logarithm of about so many parameters."""
    width, depth, vocabulary = sizes
    return log(width * (12 * width * depth + vocabulary))
