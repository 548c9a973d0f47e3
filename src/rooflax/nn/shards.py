"""Partition of arrays over the axes of a mesh.

This module imports no jax: what a mesh would hold is known without its devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflax.errors import RequestError

if TYPE_CHECKING:
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
"""The axis of a mesh that each axis is split over. The names are those of the weight table, and
three more: the layers of a model, a batch's rows, and the tokens of each. Every other axis is
whole everywhere. The part of a name before a dot says whose axis it is where layers differ in its
size."""

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


def check_split(sizes: Mapping[str, int], shards: Shards) -> None:
    """Rejects a split that leaves a remainder, with the arithmetic."""
    for axis, size in sizes.items():
        rule = rule_of(axis) if _base(axis) in SPLIT else None
        if rule and size % getattr(shards, rule):
            reject_rest(size, f"{size} {axis}", rule, getattr(shards, rule))
    if shards.expert > 1 and "experts" not in sizes:
        raise RequestError(
            f"The mesh has expert={shards.expert} and this model has no experts; leave that axis "
            f"out."
        )


def reject_rest(count: int, what: str, axis: str, parts: int) -> None:
    """Rejects a split that leaves a remainder, with the arithmetic."""
    raise RequestError(
        f"{what} do not divide over {parts} devices ({count} = {parts} x {count // parts} "
        f"+ {count % parts}); choose a mesh whose {axis} axis divides them."
    )


def _base(axis: str) -> str:
    """An axis's name without whose it is."""
    return axis.rpartition(".")[2]


def rule_of(axis: str) -> str | None:
    """The axis of a mesh that an axis is split over."""
    return RULES.get(_base(axis))


def split_axes(line: WeightLine, shards: Shards) -> tuple[str | None, ...]:
    """Per axis of a weight the mesh's axis that it is split over."""
    rules = map(rule_of, line.axis_names)
    return tuple(axis if axis and getattr(shards, axis) > 1 else None for axis in rules)
