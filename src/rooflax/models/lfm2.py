"""LFM2: short convolutions in place of attention in most layers, RMSNorm of query and key heads.

Longer than other families' files: all names of tensors and most keys are its own.
Rejected: LFM2.5's encoders, which attend both ways.

Source: transformers, models/lfm2/modeling_lfm2.py; Liquid AI, LFM2 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, MetadataReader, Raw
from rooflax.models.gguf_changes import Kernel
from rooflax.models.gguf_names import COMMON
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import ATTENTION, Layer, Mlp
from rooflax.nn.recurrent import ShortConv
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import NormKind

KINDS, FEED = ("full_attention", "conv"), "model.layers.{i}.feed_forward"
NAMES = TensorNames((
    ("final_norm", StoredAs("model.embedding_norm.weight")),
    *((f"layers.{{i}}.{part}.norm", StoredAs("model.layers.{i}.operator_norm.weight"))
      for part in ("attn", "conv")),
    *((f"layers.{{i}}.attn.{part}_norm", StoredAs(f"{ATTENTION}.{part}_layernorm.weight"))
      for part in "qk"),
    ("layers.{i}.attn.o", StoredAs(f"{ATTENTION}.out_proj.weight")),
    ("layers.{i}.mlp.norm", StoredAs("model.layers.{i}.ffn_norm.weight")),
    ("layers.{i}.mlp.gate_up", StoredAs((f"{FEED}.w1.weight", f"{FEED}.w3.weight"))),
    ("layers.{i}.mlp.down", StoredAs(f"{FEED}.w2.weight")),
))  # fmt: skip


SKIPPED_KEYS = (
    "block_dim", "block_*init*", "block_norm_eps", "conv_dim_out", "conv_use_xavier_init",
    "num_heads", "theta", "use_pos_enc", "block__name_mlp", "*ffn_te_autocast",
    "*sequence_parallel_norm_across_tp",
)  # fmt: skip
"""Keys of training, or said twice."""
TINY = common.tiny(
    "head_dim", "rms_norm_eps", "hidden_act", "tie_word_embeddings", hidden_size=60,
    num_hidden_layers=5, norm_eps=1e-5, block_multiple_of=8,
    layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.waive(*SKIPPED_KEYS)
    _check_causal(reader)
    reader.expect("block_use_swiglu", True)
    for key in ("block_ffn_use_quantized_params", "ffn_use_quantized_params"):
        reader.expect(key, False)
    reader.expect("conv_dim", reader.size("hidden_size"))
    if reader.has("norm_eps"):
        reader.waive("rms_norm_eps")
    norm = NormKind(reader.number("norm_eps", 1e-5))
    attention = common.read_attention(reader, norm=norm, kv_heads=8, theta=1_000_000.0)
    attention = replace(attention, qk_norm=attention.norm.eps)
    taps, bias = reader.size("conv_L_cache", 3, least=2), reader.flag("conv_bias", False)
    conv = ShortConv(reader.size("hidden_size"), taps, attention.norm, bias)
    mlp = Mlp(_read_width(reader), attention.norm, "silu")
    kinds = dict(zip(KINDS, (Layer(attention, mlp), Layer(conv, mlp)), strict=True))
    count = common.num_layers(reader)
    full = reader.get("full_attn_idxs", list(range(count)))
    if not isinstance(full, list):
        raise CheckpointError(f"config.json has full_attn_idxs = {full!r:.80}; it must be a list.")
    default = [KINDS[i not in full] for i in range(count)]
    layers = [kinds[kind] for kind in reader.layer_types(count, default, KINDS)]
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True))
    decoder = common.read_decoder(reader, layers, max_position=128_000, tied_embeddings=tied)
    return replace(decoder, names=NAMES)


def _check_causal(reader: ConfigReader) -> None:
    """LFM2.5's encoders, whose code is their own, differ in their architecture's name alone."""
    named = reader.get("architectures", [])
    if named not in ([], ["Lfm2ForCausalLM"], ["Lfm2Model"]):
        raise UnsupportedModelError(
            f"config.json has architectures = {named!r:.80}; of lfm2 rooflax computes "
            f"Lfm2ForCausalLM and Lfm2Model, which attend to earlier tokens alone."
        )


def _read_width(reader: ConfigReader) -> int:
    """Width of the feed-forward network: by default two thirds of the stated one, rounded up."""
    width = reader.size("block_ff_dim", reader.get("intermediate_size", 12_288))
    multiple = reader.size("block_multiple_of", 256)
    factor = reader.number("block_ffn_dim_multiplier", 1.0, most=1000)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return width
    rounded = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    if rounded == 0:
        raise CheckpointError(f"config.json has block_ff_dim = {width}, two thirds of which are 0.")
    return rounded


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    written = common.write_decoder(decoder, "lfm2", "Lfm2ForCausalLM")
    convs = [x.attention for x in decoder.layers if isinstance(x.attention, ShortConv)]
    del written["hidden_act"]
    return written | {
        "norm_eps": written.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": convs[0].taps if convs else 3,
        "conv_bias": bool(convs) and convs[0].bias,
        "layer_types": [KINDS[isinstance(x.attention, ShortConv)] for x in decoder.layers],
    }


def _read_heads(reader: MetadataReader) -> Raw:
    """K/V heads of each layer, of which one with a convolution has none."""
    heads = reader.per_layer("attention.head_count_kv")
    types = {"layer_types": [KINDS[not count] for count in heads]} if heads is not None else {}
    return reader.kv_heads(or_none=True) | types


GGUF = GGUFSpec(
    "lfm2", biases={}, stated={"block_auto_adjust_ff_dim": False}, square=True,
    keys=COMMON
    | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    layers=_read_heads,
    write=lambda decoder, raw: {
        "attention.head_count_kv": [
            0 if kind == "conv" else decoder.num_kv_heads for kind in raw["layer_types"]
        ],
    },
    tensors={"model.layers.{i}.conv.conv.weight": (("blk.{i}.shortconv.conv.weight",), Kernel())},
)  # fmt: skip
