"""`Stacked`: one weight of a stack, left where it lies.

A loop over stacked layers would copy each layer's weights out of the stack; a kernel that is told
the stack and a number reads them in place. Everyone else takes them out with `taken`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import jax
from jaxtyping import Array, Int

from rooflax.ops.quantization import QuantizedArray, member

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Member number `index` of a stack.

    Attributes:
        stack: an array, or a quantised one, with a leading axis of members.
        index: static or traced; within the stack.
    """

    stack: Array | QuantizedArray
    index: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The member's."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Stacked:
        """The member in another shape; a quantised one stays as it is packed."""
        if isinstance(self.stack, QuantizedArray):
            return self
        return Stacked(self.stack.reshape(self.stack.shape[0], *shape), self.index)


def taken(w: T | Stacked) -> T:
    """A copy of the member; what is not `Stacked` as it is."""
    return cast(T, member(w.stack, w.index)) if isinstance(w, Stacked) else w
