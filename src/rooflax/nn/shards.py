"""Partition of arrays over the axes of a mesh, and the arithmetic of the parts.

This module imports no jax: what a mesh would hold is known without its devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflax.errors import RequestError
from rooflax.ops.tiles import padded_vocab

if TYPE_CHECKING:
    from rooflax.nn.decoder import AnyAttention, Decoder
    from rooflax.nn.tensor_layouts import Shape
    from rooflax.nn.weights import WeightLine

DATA, STAGE, SEQUENCE, EXPERT, TENSOR = AXES = ("data", "stage", "sequence", "expert", "tensor")
"""Axes of a mesh, the outermost first: tensor's devices are neighbours, they exchange the most."""
FSDP = "fsdp"
TRAINING_AXES = (DATA, FSDP, TENSOR)
"""Axes of a mesh that trains, likewise."""

RULES = {
    "kv_heads": TENSOR,
    "heads": TENSOR,
    "query_heads": TENSOR,
    "mlp": TENSOR,
    "dense_mlp": TENSOR,
    "shared_mlp": TENSOR,
    "wide_mlp": TENSOR,
    "channels": TENSOR,
    "delta_heads": TENSOR,
    "vocab": TENSOR,
    "experts": EXPERT,
    "layers": STAGE,
    "rows": DATA,
    "tokens": SEQUENCE,
}
"""What is split over what. The names are those of the weight table, and three more: the layers of a
model, a batch's rows, and the tokens of each. Every other axis is whole everywhere. What stands
before a dot in a name says whose axis it is where layers differ in its size."""

SPLIT = (
    "kv_heads", "query_heads", "mlp", "dense_mlp", "shared_mlp", "wide_mlp", "channels",
    "delta_heads", "experts",
)  # fmt: skip
"""Axes of weights that a mesh must divide: query heads go with theirs, the vocabulary is padded."""


@dataclass(frozen=True)
class Shards:
    """Number of parts on each axis of a mesh; 1 for an absent axis."""

    data: int = 1
    stage: int = 1
    sequence: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def among(self, *axes: str) -> tuple[str, ...]:
        """The axes that split anything."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def __str__(self) -> str:
        return ",".join(f"{axis}={self.sizes[axis]}" for axis in self.among(*AXES)) or "one device"


def parse_mesh(text: str) -> Shards:
    """The sizes that "tensor=4,data=2" gives.

    Raises:
        RequestError: as `axis_sizes`.
    """
    return Shards(**axis_sizes(text, AXES))


def axis_sizes(text: str, axes: tuple[str, ...]) -> dict[str, int]:
    """The sizes that a mesh's text gives to some of these axes.

    Raises:
        RequestError: another axis, one twice, or a size that is none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if axis not in axes or not equals or not size.isascii() or not size.isdigit():
            raise RequestError(
                f"mesh is {text!r}; it must be AXIS=N with N devices, or several as in "
                f"tensor=4,data=2, of {', '.join(sorted(axes))}.",
                param="mesh",
            )
        if axis in sizes:
            raise RequestError(f"mesh is {text!r}, which names {axis} twice.", param="mesh")
        if int(size) < 1:
            raise RequestError(f"mesh is {text!r}; {axis} must be at least 1.", param="mesh")
        sizes[axis] = int(size)
    return sizes


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
        _reject(repeats, alike, STAGE, shards.stage)
    return config


def check_split(sizes: Mapping[str, int], shards: Shards) -> None:
    """Rejects a split that leaves a remainder, with the arithmetic."""
    for axis, size in sizes.items():
        rule = _rule(axis) if _base(axis) in SPLIT else None
        if rule and size % getattr(shards, rule):
            _reject(size, f"{size} {axis}", rule, getattr(shards, rule))
    if shards.expert > 1 and "experts" not in sizes:
        raise RequestError(
            f"The mesh has expert={shards.expert} and this model has no experts; leave that axis "
            f"out."
        )


def _reject(count: int, what: str, axis: str, parts: int) -> None:
    raise RequestError(
        f"{what} do not divide over {parts} devices ({count} = {parts} x {count // parts} "
        f"+ {count % parts}); choose a mesh whose {axis} axis divides them."
    )


def kv_copies(attention: AnyAttention, shards: Shards) -> int:
    """Number of tensor shards that each K/V head is copied to."""
    kv_heads, parts = attention.num_kv_heads, shards.tensor
    fits = parts % kv_heads == 0 and attention.num_heads % parts == 0
    return parts // kv_heads if parts > kv_heads and fits else 1


def _base(axis: str) -> str:
    """An axis's name without whose it is."""
    return axis.rpartition(".")[2]


def _rule(axis: str) -> str | None:
    """Over which axis of a mesh an axis is split."""
    return RULES.get(_base(axis))


def split_axes(line: WeightLine, shards: Shards) -> tuple[str | None, ...]:
    """Per axis of a weight the mesh's axis that it is split over."""
    rules = map(_rule, line.axis_names)
    return tuple(axis if axis and getattr(shards, axis) > 1 else None for axis in rules)


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
        if axis := _rule(name):
            sizes[name] //= getattr(shards, axis)
    return sizes
