"""ModernBERT and its rerankers: RoPE, GeGLU, no biases, norms before each branch but the first,
windows in two layers of three.

The file is longer than others, since it shares little with BERT.

Source: transformers, models/modernbert/modeling_modernbert.py; Warner et al., 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.models import common, encoders
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Layer, Mlp
from rooflax.nn.wiring import PRE, NormKind
from rooflax.ops.activation import ACTIVATIONS

SKIPPED = r"(head|decoder|classifier)\..*"
NAMES = encoders.bert_names(
    "model.",
    "layers.{i}",
    embed="embeddings.tok_embeddings",
    embed_norm="embeddings.norm",
    final_norm="final_norm",
    attn__norm="attn_norm",
    attn__qkv="attn.Wqkv",
    attn__o="attn.Wo",
    mlp__norm="mlp_norm",
    mlp__gate_up="mlp.Wi",
    mlp__down="mlp.Wo",
)
GGUF = GGUFSpec(
    "modern-bert",
    keys=encoders.GGUF_KEYS
    | {
        "attention.layer_norm_epsilon": "norm_eps",
        "attention.sliding_window": "local_attention",
        "attention.sliding_window_pattern": "global_attn_every_n_layers",
        "rope.freq_base": "global_rope_theta",
        "rope.freq_base_swa": "local_rope_theta",
        "hidden_activation": "hidden_activation",
    },
    biases={},
    is_written=False,
    waived=("attention.layer_norm_rms_epsilon",),
    tensors=encoders.gguf_tensors(NAMES),
    read=lambda reader, raw: reader.encoder(raw),
)
SCORE_HEAD = encoders.ScoreHead(
    (("head.dense", "GELU"), ("classifier", "Identity")),
    norm="head.norm",
    activation_key="classifier_activation",
    pooling_key="classifier_pooling",
)
DEFAULTS = encoders.BASE | {
    "vocab_size": 50_368, "intermediate_size": 1152, "num_hidden_layers": 22,
}  # fmt: skip
THETAS = 160_000.0, 10_000.0


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    reader.waive(
        *encoders.WAIVED, "classifier_*", "decoder_bias", "sparse_*", "deterministic_flash_attn",
        "reference_compile", "repad_logits_with_grad", "initializer_cutoff_factor",
        "layer_norm_eps",
    )  # fmt: skip
    reader.expect("position_embedding_type", "absolute", "rope", "sans_pos")
    eps, bias = reader.number("norm_eps", 1e-5), reader.flag("norm_bias", False)
    norm = NormKind(eps, bias=bias, centered=True)
    parts = common.read_biases(reader) | {"theta": None, "causal": False}
    attention = common.read_attention(reader, norm=norm, **parts)
    thetas = (
        reader.number(f"{kind}_rope_theta", theta)
        for kind, theta in zip(("global", "local"), THETAS, strict=True)
    )
    full, local = common.read_kinds_ropes(reader, attention.head_dim, *thetas)
    window = reader.size("local_attention", 128) // 2 + 1  # to each side, itself included
    every = reader.size("global_attn_every_n_layers", 3)
    count = common.num_layers(reader)
    default = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    activation = reader.choice("hidden_activation", tuple(ACTIVATIONS), "gelu")
    mlp_bias = reader.flag("mlp_bias", False)
    mlp = Mlp(reader.size("intermediate_size"), norm, activation, bias=mlp_bias)
    attentions = {
        "full_attention": replace(attention, rope=full),
        "sliding_attention": replace(attention, rope=local, window=window),
    }
    layers = [
        Layer(replace(attentions[kind], wiring=replace(PRE, before=index > 0)), mlp)
        for index, kind in enumerate(reader.layer_types(count, default))
    ]
    decoder = common.read_decoder(reader, layers, max_position=8192)
    return replace(decoder, tied_embeddings=False, has_head=False, embed_norm=norm, names=NAMES)


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    windows = common.windows_of(decoder)
    layer = decoder.layers[-1]
    assert isinstance(layer.mlp, Mlp)
    written = encoders.write_encoder(decoder, "modernbert", "ModernBertModel")
    del written["hidden_act"], written["layer_norm_eps"]
    return written | {
        "hidden_activation": layer.mlp.activation,
        "norm_eps": decoder.norm.eps,
        "norm_bias": decoder.norm.bias,
        "attention_bias": layer.attention.qkv_bias,
        "mlp_bias": layer.mlp.bias,
        "local_attention": 2 * (next((w for w in windows if w), 65) - 1),
        "layer_types": common.layer_types(windows),
        "rope_parameters": common.nested_ropes(decoder),
    }
