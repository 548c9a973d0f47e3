"""EXAONE 4.0: norms on results and of every head; with windows RoPE is in their layers alone.

Source: transformers, models/exaone4/modeling_exaone4.py; LG AI Research, EXAONE 4.0, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import COMMON, POST_NORM, WINDOW
from rooflax.models.mistral import read_window
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer
from rooflax.nn.wiring import POST

WINDOWED = 64
"""Layers of the model that has windows, by which llama.cpp knows it."""
GGUF = GGUFSpec(
    "exaone4", keys=COMMON | WINDOW, biases={}, tensors=POST_NORM, square=True,
    read=lambda reader, raw: reader.attention(raw) | {
        "sliding_window": raw.get(
            "sliding_window", 4096 if raw.get("num_hidden_layers") == WINDOWED else None
        )
    },
    lacks=lambda decoder: f"with windows in {decoder.num_layers} layers (only {WINDOWED})"
    if any(common.windows_of(decoder)) and decoder.num_layers != WINDOWED else None,
)  # fmt: skip
TINY = common.tiny(sliding_window=7, num_hidden_layers=4, sliding_window_pattern=2)


def config_from_hf(reader: ConfigReader) -> Decoder:
    attention = common.read_attention(reader, norm_eps=1e-5, kv_heads=32, wiring=POST)
    attention = replace(attention, qk_norm=attention.norm.eps)
    window, mlp = read_window(reader, 4096), common.read_mlp(reader, attention.norm)
    mlp = replace(mlp, wiring=POST)
    full = Layer(replace(attention, rope=attention.rope if window is None else None), mlp)
    local = Layer(replace(attention, window=window), mlp)
    kinds = {"full_attention": full, "sliding_attention": local}
    layers = [kinds[kind] for kind in _read_kinds(reader, window)]
    return common.read_decoder(reader, layers, max_position=2048)


def _read_kinds(reader: ConfigReader, window: int | None) -> list[str]:
    """`sliding_window_pattern` is a number, after which a layer has no window, or "LLLG"."""
    count, pattern = common.num_layers(reader), reader.get("sliding_window_pattern", 4)
    if isinstance(pattern, int):  # 0 where no layer has a window
        period = reader.size("sliding_window_pattern", 4, least=0, most=common.MOST_LAYERS)
        pattern = "L" * (period - 1) + "G"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("LG"):
        raise CheckpointError(
            f"config.json has sliding_window_pattern = {pattern!r:.80}; it must be a number or a "
            f"text of L and G."
        )
    local = [window is not None and pattern[i % len(pattern)] == "L" for i in range(count)]
    types = reader.layer_types(count, common.layer_types(tuple(x and window for x in local)))
    if window is None and "sliding_attention" in types:
        raise CheckpointError("config.json has layer_types with a window, and no sliding_window.")
    return types


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    windows = common.windows_of(decoder)
    written = common.write_decoder(decoder, "exaone4", "Exaone4ForCausalLM")
    absent = None if decoder.ropes else 4096  # of a model whose layers have neither window nor RoPE
    window = next((window for window in windows if window), absent)
    return written | {"sliding_window": window, "layer_types": common.layer_types(windows)}
