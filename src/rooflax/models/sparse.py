"""Keys of Qwen's models with experts in some layers."""

from __future__ import annotations

from typing import Any

from rooflax.errors import CheckpointError
from rooflax.models import common
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.decoder import Decoder
from rooflax.nn.parts import Mlp, Moe
from rooflax.nn.wiring import NormKind
from rooflax.ops.activation import ACTIVATIONS


def read_sparse_layers(reader: ConfigReader) -> list[bool]:
    """Layers that have experts."""
    count, step = common.num_layers(reader), reader.size("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r:.80}; it must be a list of layer numbers."
        )
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in range(count)]
    if not any(is_sparse):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r:.80} and decoder_sparse_step = {step}, "
            f"which leave none of {count} layers with experts; use a model_type without experts."
        )
    return is_sparse


def read_mlps(
    reader: ConfigReader,
    norm: NormKind,
    *,
    dense: int = 6144,
    width: int = 768,
    experts: int = 128,
    chosen: int = 8,
) -> tuple[Mlp, Moe]:
    """The feed-forward networks of layers without experts and with them.

    Args:
        dense, width, experts, chosen: the family's defaults.
    """
    activation = reader.choice("hidden_act", tuple(ACTIVATIONS), "silu")
    plain = Mlp(reader.size("intermediate_size", dense), norm, activation, key="dense_mlp")
    key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    count, chosen = common.read_experts(reader, key, experts, chosen)
    reader.expect("num_experts", count)
    width = reader.size("moe_intermediate_size", width)
    renormalise = reader.flag("norm_topk_prob", False)
    return plain, Moe(count, chosen, width, norm, activation, renormalise=renormalise)


def write_mlps(decoder: Decoder) -> dict[str, Any]:
    mlps, moe = [layer.mlp for layer in decoder.layers], decoder.moe
    assert moe is not None
    dense = {i: mlp for i, mlp in enumerate(mlps) if isinstance(mlp, Mlp)}
    widths = [*(mlp.width for mlp in dense.values()), moe.width]
    return {
        "intermediate_size": widths[0],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.width,
        "norm_topk_prob": moe.renormalise,
        "mlp_only_layers": list(dense),
    }
