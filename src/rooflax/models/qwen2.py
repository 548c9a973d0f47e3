"""Qwen 2 and 2.5: LLaMA with biases on q, k and v, and optional windows in the upper layers.

Source: transformers, models/qwen2/modeling_qwen2.py; Qwen Team, Qwen2.5 Technical Report, 2024.
"""

from __future__ import annotations

from typing import Any

from rooflax.models import llama
from rooflax.models.config_reader import ConfigReader
from rooflax.models.llama import Config, forward, logits, weights
from rooflax.ops.activation import ACTIVATIONS

__all__ = ["Config", "config_from_hf", "config_to_hf", "forward", "logits", "weights"]


def config_from_hf(reader: ConfigReader) -> Config:
    sizes = llama.read_sizes(reader, max_position=32_768, norm_eps=1e-6)
    theta, scaling = reader.rope(sizes["head_dim"], default_theta=10_000.0)
    return Config(
        **sizes,
        intermediate_size=reader.size("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        activation=reader.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=True,
        layer_windows=_layer_windows(reader, sizes["num_layers"]),
    )


def _layer_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` if given, else the layers from `max_window_layers` on."""
    reader.get("sliding_window", None)
    first = reader.size("max_window_layers", 28, least=0)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    types = reader.layer_types(num_layers, default)
    if not reader.flag("use_sliding_window", False):
        return ()
    window = reader.size("sliding_window", 4096)
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def config_to_hf(config: Config) -> dict[str, Any]:
    windows = [w for w in config.layer_windows if w is not None]
    sliding = {
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "layer_types": [
            "sliding_attention" if w else "full_attention"
            for w in config.layer_windows or (None,) * config.num_layers
        ],
    }
    return (
        llama.base_config_to_hf(config)
        | sliding
        | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
        }
    )
