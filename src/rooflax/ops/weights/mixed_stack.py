"""A stack of layers' weights in several formats, as GGUF files mix block types from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from rooflax.ops.weights.operand import Composite, Operand, StoredOperand


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedStack(Operand):
    """Stacks of one format each, and where each member lies.

    Attributes:
        stacks: with a leading axis of members.
        of: per member the number of its stack.
        row: per member its row there.
    """

    stacks: tuple[StoredOperand, ...]
    of: Int[Array, " members"]
    row: Int[Array, " members"]

    @property
    def in_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stacks[0].in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stacks[0].out_shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.of.shape[0], *self.in_shape, *self.out_shape)

    @property
    def dtype(self) -> np.dtype:
        return self.stacks[0].dtype

    def at(self, index: Any) -> MixedMember:
        return MixedMember(self, index)

    def member(self, index: int) -> StoredOperand:
        """A copy of one of the stack, by a number that is known."""
        return self.stacks[int(self.of[index])].member(int(self.row[index]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedMember(Composite):
    """One of a `MixedStack`, left where it lies: the program branches to its format's matmul."""

    whole: MixedStack
    index: Int[Array, ""]

    @property
    def in_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.whole.in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.whole.out_shape

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    def branch(self, run: Callable[[Operand], Array]) -> Array:
        """`run` of the member, in the format that it has."""
        runs = [lambda row, stack=stack: run(stack.at(row)) for stack in self.whole.stacks]
        return jax.lax.switch(self.whole.of[self.index], runs, self.whole.row[self.index])
