"""Gemma 4's text model: heads of other sizes in layers with a window than in those without.

The file is longer than others, since it describes three kinds of models: dense ones (12B, 31B),
whose layers without a window use their keys as values; a mixture of experts beside a dense network
(26B-A4B); and those with an embedding per layer (E2B, E4B), whose last layers attend to the keys
and values of layers before. Rejected: attention both ways, another vocabulary per layer.

Source: transformers, models/gemma4/modeling_gemma4.py and configuration_gemma4.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec, Metadata, MetadataReader, Raw, write_local_theta
from rooflax.models.gguf_changes import KEEP
from rooflax.models.gguf_names import COMMON, POST_NORM
from rooflax.nn.decoder import Decoder, TensorNames
from rooflax.nn.parts import Attention, Layer, Mlp, Moe
from rooflax.nn.per_layer import PerLayer
from rooflax.nn.rope import Rope, RopeScaling
from rooflax.nn.weights import StoredAs
from rooflax.nn.wiring import SANDWICH, NormKind
from rooflax.ops.activation import ACTIVATIONS

DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
"""Values that files leave out where they are transformers' defaults."""
SKIPPED = (
    r"(model\.)?(language_model\.)?(model\.)?layers\.\d+\.self_attn\.([kv]_proj|k_norm)\.weight"
)
"""Tensors of layers that attend to another layer's keys and values."""
LAYER, LINE = "model.layers.{i}", "layers.{i}.mlp"
EXPERTS = TensorNames(
    (
        (f"{LINE}.norm", StoredAs(f"{LAYER}.pre_feedforward_layernorm_2.weight")),
        (f"{LINE}.router", StoredAs(f"{LAYER}.router.proj.weight")),
        (f"{LINE}.router_norm", StoredAs(f"{LAYER}.router.scale")),
        (f"{LINE}.expert_scales", StoredAs(f"{LAYER}.router.per_expert_scale")),
        (f"{LINE}.gate_up", StoredAs(f"{LAYER}.experts.gate_up_proj")),
        (f"{LINE}.down", StoredAs(f"{LAYER}.experts.down_proj")),
    )
)
NAMED = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
TINY = common.tiny(
    "hidden_act", "rope_theta", hidden_size=56, hidden_activation="gelu_pytorch_tanh",
    num_hidden_layers=4, tie_word_embeddings=True, num_key_value_heads=3, head_dim=16,
    global_head_dim=24, sliding_window=7, num_global_key_value_heads=2, attention_k_eq_v=True,
    hidden_size_per_layer_input=0, final_logit_softcapping=20.0,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters={
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
)  # fmt: skip


def config_from_hf(reader: ConfigReader) -> Decoder:
    reader.assume(**DEFAULTS)
    reader.expect("use_bidirectional_attention", None, "vision")  # which is of images' tokens
    count = common.num_layers(reader)
    kinds = reader.layer_types(
        count, ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    )
    kinds = [*kinds[:-1], "full_attention"]
    attentions = _read_attentions(reader, kinds)
    norm = attentions["full_attention"].norm
    split = count - reader.size("num_kv_shared_layers", 0, least=0, most=count - 1)
    if missing := set(kinds[split:]) - set(kinds[:split]):
        raise CheckpointError(
            f"config.json has num_kv_shared_layers = {count - split} of {count} layers, which "
            f"leave none of type {missing.pop()} with keys and values of its own."
        )
    activation = reader.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    network, shared = _read_networks(reader, norm, activation)
    per_layer = _read_per_layer(reader, norm, activation, count)
    layers = []
    for index, kind in enumerate(kinds):
        attention = replace(attentions[kind], reuses_kv=index >= split)
        mlp = shared if index >= split else network
        layers.append(Layer(attention, mlp, per_layer=per_layer, scaled=True))
    cap = "final_logit_softcapping"
    decoder = common.read_decoder(reader, layers, max_position=131_072, tied_embeddings=True)
    # Files have it beside moe_intermediate_size, transformers does not read it.
    reader.expect("expert_intermediate_size", None, decoder.moe.width if decoder.moe else None)
    return replace(
        decoder,
        embed_scale=decoder.hidden_size**0.5,
        logit_cap=reader.number(cap) if reader.get(cap, None) is not None else None,
        names=EXPERTS if decoder.moe else TensorNames(),
    )


def _read_attentions(reader: ConfigReader, kinds: Sequence[str]) -> dict[str, Attention]:
    """Attentions by type of layer."""
    parts = common.read_biases(reader) | {"wiring": SANDWICH, "theta": None, "scale": 1.0}
    local = common.read_attention(reader, norm_eps=1e-6, v_norm=True, **parts)
    local = replace(local, qk_norm=local.norm.eps, window=reader.size("sliding_window", 512))
    same = reader.flag("attention_k_eq_v", False)
    sizes = _read_full_heads(reader, kinds, local, same)
    full = replace(local, window=None, key="global_attn", values_are_keys=same)
    full = replace(full, num_kv_heads=sizes[0], head_dim=sizes[1])
    if full.num_heads % full.num_kv_heads or full.head_dim % 2:
        raise CheckpointError(
            f"config.json gives layers without a window {full.num_kv_heads} K/V heads of "
            f"{full.head_dim}; the first must divide num_attention_heads = {full.num_heads}, the "
            f"second be even."
        )
    ropes = common.read_nested_ropes(reader, full.head_dim, 1e6, 1e4, local.head_dim) or (
        Rope(1e6, RopeScaling("proportional", 1.0, share=0.25)),
        Rope(1e4),
    )
    full, local = (replace(a, rope=rope) for a, rope in zip((full, local), ropes, strict=True))
    return {"full_attention": full, "sliding_attention": local}


def _read_full_heads(
    reader: ConfigReader, kinds: Sequence[str], local: Attention, same: bool
) -> tuple[int, int]:
    """K/V heads of layers without a window, and their size; transformers 5.23 writes them layer by
    layer."""
    count = reader.size("num_global_key_value_heads", local.num_kv_heads)
    dim = reader.size("global_head_dim", 512)
    each = reader.get("per_layer_config", None)
    if reader.is_null("per_layer_config"):  # transformers: no layer has heads of its own
        return local.num_kv_heads, local.head_dim
    if each is not None:
        if isinstance(each, dict):  # transformers pads the layers' numbers with zeros
            each = {layer.lstrip("0") or "0": heads for layer, heads in each.items()}
        full = [str(index) for index, kind in enumerate(kinds) if kind == "full_attention"]
        only = {"head_dim"} | ({"num_key_value_heads"} if same else set())
        stated = each.get(full[0]) if isinstance(each, dict) and each else each
        if (
            not isinstance(stated, dict)
            or set(stated) - only
            or each not in ({}, dict.fromkeys(full, stated))
        ):
            raise CheckpointError(
                f"config.json has per_layer_config = {each!r:.80}; it must give every layer of "
                f"type full_attention, and no other, the same {' and '.join(sorted(only))}."
            )
        heads = ConfigReader(stated)
        count = heads.size("num_key_value_heads", local.num_kv_heads)
        dim = heads.size("head_dim", local.head_dim)
    return count if same else local.num_kv_heads, dim


def _read_networks(
    reader: ConfigReader, norm: NormKind, activation: str
) -> tuple[Mlp | Moe, Mlp | Moe]:
    """Networks of layers with their own keys and values, and of the others."""
    has_experts, is_wide = reader.flag("enable_moe_block", False), "use_double_wide_mlp"
    key = "dense_mlp" if has_experts else "mlp"
    dense = Mlp(reader.size("intermediate_size"), norm, activation, key=key, wiring=SANDWICH)
    wide = replace(dense, width=2 * dense.width, key="wide_mlp")
    wide = wide if reader.flag(is_wide, False) else dense
    if not has_experts:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            reader.get(name, None)
        return dense, wide
    count, width = (
        reader.size("num_experts", most=common.MOST_EXPERTS),
        reader.size("moe_intermediate_size"),
    )
    chosen = reader.size("top_k_experts", most=count)
    moe = Moe(count, chosen, width, norm, activation, stacked=True, beside=dense)
    moe = replace(moe, router_norm=True, expert_scales=True)
    return moe, replace(moe, beside=wide)


def _read_per_layer(
    reader: ConfigReader, norm: NormKind, activation: str, count: int
) -> PerLayer | None:
    width = reader.size("hidden_size_per_layer_input", 256, least=0)
    rows = reader.get("vocab_size_per_layer_input", 262_144)
    if width and rows != reader.size("vocab_size"):
        raise UnsupportedModelError(
            f"config.json has vocab_size_per_layer_input = {rows!r:.80}, which rooflax does not "
            f"compute (only vocab_size, {reader.size('vocab_size')})."
        )
    return PerLayer(width, count, norm, activation) if width else None


def config_to_hf(decoder: Decoder) -> dict[str, Any]:
    kinds = {attention.window is None: attention for attention in reversed(decoder.attentions)}
    full, local = kinds[True], kinds.get(False, kinds[True])
    networks = [layer.mlp for layer in decoder.layers]
    dense = [m.beside if isinstance(m, Moe) and m.beside else m for m in networks]
    moe, per_layer = decoder.moe, decoder.per_layer
    written = common.write_nested(decoder, "gemma4_text", "Gemma4ForCausalLM")
    return written | {
        "hidden_activation": written.pop("hidden_act"),
        "intermediate_size": dense[0].width,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.values_are_keys,
        "final_logit_softcapping": decoder.logit_cap,
        "num_kv_shared_layers": sum(layer.attention.reuses_kv for layer in decoder.layers),
        "use_double_wide_mlp": dense[-1].width != dense[0].width,
        "hidden_size_per_layer_input": per_layer.width if per_layer else 0,
        "vocab_size_per_layer_input": decoder.vocab_size,
        "enable_moe_block": moe is not None,
        "num_experts": moe.num_experts if moe else None,
        "top_k_experts": moe.experts_per_token if moe else None,
        "moe_intermediate_size": moe.width if moe else None,
    }


def _read_gguf_layers(reader: MetadataReader) -> Raw:
    """Reads what differs by layer."""
    flags = reader.per_layer("attention.sliding_window_pattern")
    heads = reader.per_layer("attention.head_count_kv")
    widths = reader.per_layer("feed_forward_length")
    named = [re.fullmatch(r"blk\.(\d+)\.attn_(k|v)\.weight", n) for n in reader.file.names()]
    keys, values = ({m[1] for m in named if m and m[2] == part} for part in "kv")
    raw: Raw = {
        "attention_k_eq_v": bool(keys - values),
        "enable_moe_block": bool(reader.get("expert_count", 0)),
        "final_logit_softcapping": reader.get("final_logit_softcapping", 30.0)
        or None,  # llama.cpp's
    }
    if heads and flags:
        by_kind = dict(zip(flags, heads, strict=False))
        reader.check_layers("attention.head_count_kv", heads, [by_kind.get(f) for f in flags])
        raw["num_key_value_heads"] = by_kind.get(True, heads[0])
        raw["num_global_key_value_heads"] = by_kind.get(False, heads[-1])
    if widths:
        first, last, shared = widths[0], widths[-1], reader.get("attention.shared_kv_layers", 0)
        split = len(widths) - shared if type(shared) is int else 0
        wanted = [last if i >= split else first for i in range(len(widths))]
        reader.check_layers("feed_forward_length", widths, wanted)
        raw["intermediate_size"] = first
        raw["use_double_wide_mlp"] = last != first
    return raw


def _read_gguf(reader: MetadataReader, raw: Raw) -> Raw:
    """RoPE of layers without a window and with one, and the rows of their embeddings."""
    for end, key in (("", "global_head_dim"), ("_swa", "head_dim")):
        reader.expect(f"attention.value_length{end}", raw.get(key))
        reader.expect(f"rope.dimension_count{end}", raw.get(key))
    reader.expect("attention.causal", True)
    theta, local = reader.get("rope.freq_base", 1e4), reader.get("rope.freq_base_swa", 1e4)
    full = reader.recovered(raw.get("global_head_dim"), theta, "proportional")
    ropes = {
        "full_attention": full | {"rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {"rope_parameters": ropes, "vocab_size_per_layer_input": raw.get("vocab_size")}


def _write_gguf(decoder: Decoder, raw: Raw) -> Metadata:
    """Heads of layers with a window, and wider networks of layers without keys of their own."""
    size, width, windows = raw["head_dim"], raw["intermediate_size"], common.windows_of(decoder)
    written = write_local_theta(decoder, raw) | {
        "attention.value_length_swa": size, "rope.dimension_count_swa": size,
        "final_logit_softcapping": raw["final_logit_softcapping"] or 0.0,  # absent is 30
        "attention.head_count_kv": [
            raw["num_global_key_value_heads" if window is None else "num_key_value_heads"]
            for window in windows
        ],
    }  # fmt: skip
    if raw["use_double_wide_mlp"]:
        split = len(windows) - raw["num_kv_shared_layers"]
        written["feed_forward_length"] = [
            width if index < split else 2 * width for index in range(len(windows))
        ]
    return written


def _lacks_sharing(decoder: Decoder) -> str | None:
    """Names the layers whose keys and values llama.cpp shares otherwise."""
    attentions = [layer.attention for layer in decoder.layers]
    cut = [attention.window is not None for attention in attentions if not attention.reuses_kv]
    if not any(cut):
        return "without a window"
    if len(cut) < len(attentions) and cut[-2:] != [True, False]:
        return (
            "whose last two layers with keys and values of their own are not one with a window "
            "and then one without"
        )
    return None


GGUF = GGUFSpec(
    "gemma4", biases={}, required=("attention.sliding_window",), lists_merges=True,
    keys={key: hf for key, hf in COMMON.items() if key != "rope.freq_base"} | {
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "attention.sliding_window": "sliding_window",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    layers=_read_gguf_layers,
    read=_read_gguf,
    write=_write_gguf,
    lacks=_lacks_sharing,
    tensors=POST_NORM
    | {f"{LAYER}.{hf}": ((f"blk.{{i}}.{stored}",), KEEP) for hf, stored in NAMED.items()},
)  # fmt: skip
