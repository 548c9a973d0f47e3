"""Named architectures with random weights, for measuring: `preset:NAME`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rooflax.errors import RequestError, did_you_mean

PREFIX = "preset:"
EMBEDDED_NAME, CHAT_NAME = EMBEDDED = ("rooflax-python-5m", "rooflax-chat-5m")
"""Models inside the package: the default, and that of a conversation."""
SEED = 0
"""Seed of every preset's weights: the same on every run."""

_FILE = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
PUBLISHED: tuple[str, ...] = tuple(_FILE["published"])
"""Published files (tests/data/published_configs has them whole, with their sources), without what
no computation reads; of wrappers their text part."""
PRESETS: dict[str, dict[str, Any]] = _FILE["made_here"] | _FILE["published"]
PRESETS["qwen3-moe-3b"] = PRESETS["qwen3-30b-a3b"] | {"num_hidden_layers": 4, "vocab_size": 32768}
"""Each as the config.json of the model it is named after, but for GPT-OSS's MXFP4 (-q mxfp4);
gpt-oss-3b and qwen3-moe-3b have four layers of the larger model and a small vocabulary. Tiny ones
are float32."""


def preset_config(model: str) -> dict[str, Any]:
    """The config.json of "preset:NAME".

    Raises:
        RequestError: no such preset.
    """
    name = model.removeprefix(PREFIX)
    if name not in PRESETS:
        meant = did_you_mean(name, PRESETS)
        raise RequestError(f"There is no preset {name!r:.80}{meant}; `rooflax models` lists them.")
    return PRESETS[name]
