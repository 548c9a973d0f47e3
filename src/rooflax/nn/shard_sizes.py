"""Sizes of a model's parts on the devices of a mesh."""

from __future__ import annotations

from rooflax.errors import RequestError
from rooflax.nn.decoder import AnyAttention, Decoder
from rooflax.nn.shards import DATA, SEQUENCE, STAGE, Shards, check_split, reject_rest, rule_of
from rooflax.nn.tensor_layouts import Shape
from rooflax.nn.weights import WeightLine
from rooflax.ops.tiles import padded_vocab


def config_on(config: Decoder, shards: Shards) -> Decoder:
    """The config that the parts of a model have: with as many K/V heads as the split needs.

    Where there are more tensor shards than K/V heads, each K/V head is copied to as many shards,
    and its query heads are divided among them.

    Raises:
        RequestError: a split that leaves a remainder, with the arithmetic.
    """
    for kind in config.attentions:
        if kv_copies(kind, shards) > 1 and kind.flat_norm:
            raise RequestError(
                f"The mesh has tensor={shards.tensor} and the model {kind.num_kv_heads} K/V heads, "
                f"whose norm is of all heads together; choose a tensor axis that divides them."
            )
    if config.groups.state is not None and (split := shards.among(DATA, SEQUENCE)):
        raise RequestError(
            f"The mesh has {split[0]}={shards.sizes[split[0]]} and the model layers with state, "
            f"which rooflax splits over tensor, expert and stage alone; leave that axis out."
        )
    config = config.with_kv_copies({kind: kv_copies(kind, shards) for kind in config.attentions})
    check_split(config.axis_sizes, shards)
    repeats = config.num_layers // config.groups.period
    if shards.stage > 1 and repeats % shards.stage:
        period = config.groups.period
        alike = f"{config.num_layers} layers" if period == 1 else f"{repeats} x {period} layers"
        reject_rest(repeats, alike, STAGE, shards.stage)
    return config


def kv_copies(attention: AnyAttention, shards: Shards) -> int:
    """Number of tensor shards that each K/V head is copied to."""
    kv_heads, parts = attention.num_kv_heads, shards.tensor
    fits = parts % kv_heads == 0 and attention.num_heads % parts == 0
    return parts // kv_heads if parts > kv_heads and fits else 1


def whole_shape(line: WeightLine, config: Decoder, shards: Shards) -> Shape:
    """All parts of a weight together, the vocabulary padded; `config` is as `config_on` gives."""
    sizes = dict(config.axis_sizes)
    sizes["vocab"] = padded_vocab(sizes["vocab"], shards.tensor)
    return line.shape(sizes)


def part_sizes(config: Decoder, shards: Shards) -> dict[str, int]:
    """Axis sizes of one device's part; `config` is as `config_on` gives."""
    sizes = dict(config.axis_sizes)
    sizes["vocab"] = padded_vocab(sizes["vocab"], shards.tensor)
    for name in sizes:
        if axis := rule_of(name):
            sizes[name] //= getattr(shards, axis)
    return sizes
