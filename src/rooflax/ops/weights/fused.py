"""A weight of several tensors side by side, such as q, k and v, each in a format of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rooflax.ops.weights.operand import Axes, Operand, StoredOperand
from rooflax.ops.weights.quantized import Quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fused(Operand):
    """Weights of the same inputs, whose outputs lie side by side along one axis.

    Attributes:
        parts: one of each run of tensors of one format.
        axis: of `out_shape`.
        format: the tensors' formats, as `ops.format_names.formats_of` reads them.
    """

    parts: tuple[Operand, ...]
    axis: int = field(metadata={"static": True})
    format: str = field(metadata={"static": True})

    @property
    def in_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.parts[0].in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        first = list(self.parts[0].out_shape)
        first[self.axis] = sum(part.out_shape[self.axis] for part in self.parts)
        return tuple(first)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (*first.shape[: first.ndim - len(first.out_shape)], *self.out_shape)

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> Fused:
        return self._each(lambda part: part.split(axes, stack, lead))

    def at(self, index: Any) -> Fused:
        return self._each(lambda part: part.at(index))

    def member(self, index: Any) -> Fused:
        """A copy of one of a stack."""
        return self._each(lambda part: cast(StoredOperand, part).member(index))

    def _each(self, change: Callable[[Operand], Operand]) -> Fused:
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def apart(self, outputs: Array | None) -> Sequence[Array | None]:
        """[..., out] of the whole as [..., out] of each part."""
        if outputs is None:
            return [None] * len(self.parts)
        lead = outputs.shape[:-1]
        ends = np.cumsum([part.out_shape[self.axis] for part in self.parts])[:-1]
        pieces = jnp.split(outputs.reshape(*lead, *self.out_shape), ends, len(lead) + self.axis)
        return [one.reshape(*lead, -1) for one in pieces]

    def together(self, outputs: Sequence[Array]) -> Array:
        """[..., out] of each part as [..., out] of the whole."""
        lead = outputs[0].shape[:-1]
        each = [
            one.reshape(*lead, *part.out_shape)
            for one, part in zip(outputs, self.parts, strict=True)
        ]
        return jnp.concatenate(each, len(lead) + self.axis).reshape(*lead, -1)


def quantized_parts(leaf: Quantized | Fused) -> tuple[Quantized, ...]:
    """The parts of a fused weight, or a weight of one format as its only part."""
    return cast(tuple[Quantized, ...], leaf.parts) if isinstance(leaf, Fused) else (leaf,)


def packed_format(leaf: Any) -> str | None:
    """The format of a leaf of few bits, or of each of its tensors; None where it is plain."""
    return leaf.format if isinstance(leaf, Quantized | Fused) else None
