"""SmolLM3: LLaMA of which every fourth layer has no RoPE, with optional windows in those.

Source: transformers, models/smollm3/modeling_smollm3.py; Bakouch et al., SmolLM3, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.gguf_names import BIASES
from rooflax.models.llama import write_biases
from rooflax.models.qwen2 import write_windows
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer

GGUF = GGUFSpec("smollm3", biases=BIASES, permuted=True)
TINY = common.tiny(
    "head_dim", hidden_size=60, num_hidden_layers=4, rms_norm_eps=1e-6, tie_word_embeddings=True,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    parts = common.read_biases(reader) | {"kv_heads": 4, "theta": 2_000_000.0}
    attention = common.read_attention(reader, norm_eps=1e-6, **parts)
    ropes = [attention.rope if has_rope else None for has_rope in _read_rope_layers(reader)]
    reader.get("max_window_layers", None)  # files have it; it changes nothing
    window = reader.size("sliding_window", 0, least=0) or None
    window = window if reader.flag("use_sliding_window", False) else None
    default = common.layer_types(tuple(None if rope else window for rope in ropes))
    types = reader.layer_types(len(ropes), default)
    mlp = common.read_mlp(reader, attention.norm, bias=reader.flag("mlp_bias", False))
    layers = [
        Layer(replace(attention, rope=r, window=window if t == "sliding_attention" else None), mlp)
        for r, t in zip(ropes, types, strict=True)
    ]
    return common.read_decoder(reader, layers, max_position=32_768, tied_embeddings=True)


def _read_rope_layers(reader: ConfigReader) -> list[int]:
    """Per layer 1 if it has RoPE, whatever the key's name says, and 0 if not."""
    count, interval = common.num_layers(reader), reader.size("no_rope_layer_interval", 4)
    flags = reader.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)])
    if not isinstance(flags, list) or len(flags) != count or any(x not in (0, 1) for x in flags):
        raise CheckpointError(
            f"config.json has no_rope_layers = {flags!r:.80}; it must be a 0 or 1 for each of the "
            f"{count} layers."
        )
    return flags


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "smollm3", "SmolLM3ForCausalLM")
    ropes = [int(layer.attention.rope is not None) for layer in decoder.layers]
    windows = write_windows(common.windows_of(decoder))
    return written | windows | write_biases(decoder) | {"no_rope_layers": ropes}
