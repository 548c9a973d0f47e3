"""A stack of layers' weights in several formats: GGUF files mix block types from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rooflax.ops.weights.fused import Fused
from rooflax.ops.weights.operand import Axes, Branch, Operand, StoredOperand


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedStack(Operand):
    """Stacks of one format each, and where each member lies.

    Attributes:
        stacks: with a leading axis of members.
        of: per member the number of its stack, whose members are in order.
    """

    stacks: tuple[StoredOperand | Fused, ...]
    of: tuple[int, ...] = field(metadata={"static": True})

    @property
    def row(self) -> tuple[int, ...]:
        """Per member its row of its stack."""
        return tuple(self.of[:i].count(number) for i, number in enumerate(self.of))

    @property
    def in_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stacks[0].in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.stacks[0].out_shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.of), *self.stacks[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.stacks[0].dtype

    def at(self, index: Any) -> MixedMember:
        return MixedMember(self, index)

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> MixedStack:
        return replace(self, stacks=tuple(one.split(axes, stack, lead) for one in self.stacks))

    def member(self, index: int) -> StoredOperand | Fused:
        """A copy of one of the stack, by a number that is known."""
        return self.stacks[self.of[index]].member(self.row[index])


def stack_by_kind(kinds: Sequence[Hashable], stack: Callable[[list[int]], Any]) -> Any:
    """A stack of leaves, or a `MixedStack` where they are of several kinds.

    Args:
        kinds: of each leaf; equal ones share a stack.
        stack: makes that of the leaves with these numbers.
    """
    rows: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        rows.setdefault(kind, []).append(number)
    stacks, order = [stack(numbers) for numbers in rows.values()], list(rows)
    if len(stacks) == 1:
        return stacks[0]
    return MixedStack(tuple(stacks), tuple(order.index(kind) for kind in kinds))


def stack_leaves(leaves: Sequence[Any]) -> Any:
    """`stack_by_kind` of arrays, or of trees of them, by jax.numpy."""

    def stack(numbers: list[int]) -> Any:
        return jax.tree.map(lambda *parts: jnp.stack(parts), *(leaves[i] for i in numbers))

    return stack_by_kind([jax.tree.structure(leaf) for leaf in leaves], stack)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedMember(Branch):
    """One of a `MixedStack`: the program branches to its format's matmul."""

    whole: MixedStack
    index: Int[Array, ""]

    def branch(self, run: Callable[[Operand], Array]) -> Array:
        """`run` of the member, in the format that it has."""
        runs = [lambda row, stack=stack: run(stack.at(row)) for stack in self.whole.stacks]
        of, row = (jnp.asarray(each, jnp.int32) for each in (self.whole.of, self.whole.row))
        return jax.lax.switch(of[self.index], runs, row[self.index])
