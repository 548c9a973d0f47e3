"""The weight table: one line per weight, read by everyone who handles weights.

A family's table maps our name of a weight to a `WeightLine`: its axes, its names in a checkpoint,
and the `TensorLayout` by which one becomes the other. Sharding, initialisation, loading, counting
of bytes and saving all read that line; what multiplies is an `Operand`, see `ops.weights`. This
module works on NumPy arrays and shapes; it knows no files and no jax.

A name with "{i}" stands for every layer. In the pytree of arrays, layer weights live in
`weights["layers"][i]["attn.qkv"]`, all others at the top: `weights["embed"]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooflax.nn.tensor_layouts import Shape, TensorLayout

AS_STORED = TensorLayout()
LAYER_PREFIX = "layers.{i}."


@dataclass(frozen=True)
class StoredAs:
    """Place of a weight in other checkpoints; a layout of None is the line's own."""

    hf: str | tuple[str, ...]
    layout: TensorLayout | None = None


@dataclass(frozen=True)
class WeightLine:
    """One line of a family's table.

    Attributes:
        axes: names of the array's axes; "a b -> c" is a matmul that contracts a and b,
            "s | a -> c" one for each s.
        hf: the tensor's name in a Hugging Face checkpoint, or several if the layout fuses them.
        layout: how the checkpoint's tensors become ours.
        init: "normal", "residual" (normal, shrunk by the depth), "ones" or "zeros".
        other: where some checkpoints keep it instead.
    """

    axes: str
    hf: str | tuple[str, ...]
    layout: TensorLayout = AS_STORED
    init: str = "normal"
    other: StoredAs | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def places(self) -> tuple[WeightLine, ...]:
        """This line, and its alternatives in other checkpoints."""
        if self.other is None:
            return (self,)
        layout = self.other.layout or self.layout
        return self, replace(self, hf=self.other.hf, layout=layout, other=None)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.axes.replace("->", " ").replace("|", " ").split())

    @property
    def num_stacked(self) -> int:
        """Leading axes that number matmuls of their own."""
        stack, bar, _ = self.axes.partition("|")
        return len(stack.split()) if bar else 0

    @property
    def num_inputs(self) -> int:
        """Axes left of the arrow, those of a stack included."""
        return len(self.axes.rpartition("->")[0].replace("|", " ").split())

    def in_out_shape(self, sizes: Mapping[str, int]) -> tuple[Shape, Shape]:
        """Shape left and right of the arrow; without an arrow everything is on the right."""
        shape, inner = self.shape(sizes), self.num_inputs
        return shape[:inner], shape[inner:]

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(sizes[name] for name in self.axis_names)

    def hf_shapes(self, sizes: Mapping[str, int]) -> list[Shape]:
        return self.layout.hf_shapes(*self.in_out_shape(sizes))

    def split(self, array: np.ndarray, sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Our array as the checkpoint's tensors, in their shapes."""
        parts = self.layout.split(array, self.in_out_shape(sizes)[0])
        return [p.reshape(s) for p, s in zip(parts, self.hf_shapes(sizes), strict=True)]


@dataclass(frozen=True)
class Param:
    """One array of the model: its line in the table, its layer (None outside the layers)."""

    key: str
    layer: int | None
    line: WeightLine

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name.replace("{i}", str(self.layer)) for name in self.line.names)

    @property
    def name(self) -> str:
        return self.key if self.layer is None else f"layers.{self.layer}.{self.key}"


def assemble(num_layers: int, arrays: Iterator[tuple[Param, Any]]) -> dict[str, Any]:
    """The pytree of weights from (parameter, leaf) pairs."""
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    weights: dict[str, Any] = {}
    for param, leaf in arrays:
        (weights if param.layer is None else layers[param.layer])[param.key] = leaf
    return weights | {"layers": tuple(layers)}
