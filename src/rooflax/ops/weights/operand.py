"""`Operand`: what multiplies activations: plain arrays, members of stacks, operands of operands.

A leaf of a model's tree of weights is a plain array or an `Operand`. `as_operand` and `as_table`
make one of either; nobody outside of this package asks which it was. The formats of few bits are in
`formats`. `ops.linear` multiplies by them and looks their rows up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.errors import RequestError
from rooflax.ops.dot import dot_general

T = TypeVar("T")
Axes = Sequence[str | None]
"""Per axis of a weight, the axis of the mesh that splits it."""


class Operand:
    """A matrix, with its inputs and its outputs on one axis each or on several.

    Attributes:
        in_shape, out_shape: their axes.
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.in_shape, *self.out_shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the numbers that it stands for."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> Any:
        """A tree like this one, of `PartitionSpec`s.

        Args:
            axes: of the weight's own axes, a stack of experts' included.
            stack: how many of them are that stack's.
            lead: of the axes of stacked layers in front of them.
        """
        raise NotImplementedError

    def at(self, index: Any) -> Operand:
        """One of a stack, left where it lies."""
        raise NotImplementedError

    def in_stack(self) -> tuple[StoredOperand, Int[Array, ""] | None]:
        """Arrays that kernels read, and the number of the stack's member; None is all.

        Raises:
            RequestError: it is made of other weights.
        """
        name = type(self).__name__
        raise RequestError(f"{name} cannot be a weight of experts; choose plain or quantized ones.")


class Composite(Operand):
    """An operand made of operands, as an adapter is.

    Its `matmul` and `take` have the arguments of those of `ops.linear.api`, which call them.
    """

    matmul: Callable[..., Array]
    take: Callable[..., Array]


class Wrapper(Composite):
    """A composite around one weight.

    Attributes:
        base: an array [*in, *out] or an operand; a table is [vocab, hidden].
        is_table: the base makes logits, and gives rows where `take` is called.
    """

    base: Any
    is_table: bool

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    @property
    def operand(self) -> Operand:
        """The base, as a matmul takes it."""
        if self.is_table:
            return as_table(self.base)
        return as_operand(self.base, contract=len(self.in_shape))


class StoredOperand(Operand):
    """A weight that is arrays, or a stack of them; what backends ask of it.

    Attributes:
        code: how numbers lie in its arrays, "matrix", "table", or a format's code.
        quantizes_activations: a matmul rounds activations to int8.
        num_terms: int8 numbers that a rounded activation consists of.
        rotates_inputs: a matmul rotates activations first, as the weight's inputs were.
        packing: in which order codes lie, "panels" or "matrix"; None where nothing is packed.
    """

    code: str
    quantizes_activations: bool = False
    num_terms: int = 1
    rotates_inputs: bool = False
    packing: str | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def inner(self) -> int:
        return math.prod(self.in_shape)

    @property
    def outer(self) -> int:
        return math.prod(self.out_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, *self.in_shape, *self.out_shape)

    def at(self, index: Any) -> StackMember:
        return StackMember(self, index)

    def in_stack(self) -> tuple[StoredOperand, Int[Array, ""] | None]:
        return self, None

    def member(self, index: Any) -> StoredOperand:
        """A copy of one of the stack."""
        raise NotImplementedError

    def joined(self) -> StoredOperand:
        """A stack of stacks as one."""
        raise NotImplementedError

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Values, scales and sums, empty where there are none."""
        raise NotImplementedError

    def activations(self, x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
        """float32 rows as a matmul sees them."""
        return x

    def numbers(self) -> Float[Array, "*stack in out"]:
        """Numbers in float32."""
        raise NotImplementedError

    @property
    def plain_rows(self) -> Float[Array, "out in"] | None:
        """The outputs' weights where they need no decoding; None where `take` decodes them."""
        return None

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n in"]:
        """The weights of single outputs in float32, such as tokens' embeddings, by XLA."""
        raise NotImplementedError

    def dot(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """x @ w by XLA, in float32."""
        raise NotImplementedError

    def dot_each(self, x: Float[Array, "rows stack in"]) -> Float[Array, "rows stack out"]:
        """`dot` of each of a stack with rows of its own."""
        rows = self.activations(x.astype(jnp.float32).reshape(-1, self.inner))
        return _dot_each(rows.reshape(x.shape), self.numbers())


def _dot_each(x: Array, w: Array) -> Array:
    """[rows, stack, in] by [stack, in, out]."""
    return dot_general(x, w, (((2,), (1,)), ((1,), (0,)))).swapaxes(0, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(StoredOperand):
    """A weight at its own width.

    Attributes:
        array: [*stack, in, out]; a table is [out, in].
        table: outputs are rows, as in an embedding.
    """

    array: Array
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    table: bool = field(default=False, metadata={"static": True})

    @property
    def code(self) -> str:  # type: ignore[override]
        return "table" if self.table else "matrix"

    @property
    def stack(self) -> tuple[int, ...]:
        return self.array.shape[:-2]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def plain_rows(self) -> Float[Array, "out in"]:
        return self.array if self.table else self.array.T

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> Dense:
        """Checks a split: of inputs (or outputs) on several axes, only the first can be split."""
        cut = len(self.out_shape) if self.table else stack + len(self.in_shape)
        both = (axes[stack], axes[cut])
        spec: Any = PartitionSpec(*lead, *axes[:stack], *both)
        return replace(self, array=spec)

    def member(self, index: Any) -> Dense:
        return replace(self, array=self.array[index])

    def joined(self) -> Dense:
        return replace(self, array=self.array.reshape(-1, *self.array.shape[-2:]))

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.array, jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.int32)

    def numbers(self) -> Float[Array, "*stack in out"]:
        wide = self.array.astype(jnp.float32)
        return wide.swapaxes(-1, -2) if self.table else wide

    def dot(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        return dot_general(x, self.array, (((1,), (1 if self.table else 0,)), ((), ())))

    def dot_each(self, x: Float[Array, "rows stack in"]) -> Float[Array, "rows stack out"]:
        return _dot_each(x, self.array)


class Member(Operand):
    """One of a stack, left where it lies.

    Attributes:
        whole: the stack.
    """

    whole: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The member's."""
        return self.whole.shape[1:]

    @property
    def in_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.whole.in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.whole.out_shape

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype


class Branch(Member):
    """An operand that is one of several, which the program chooses when it runs.

    `ops.linear.api` calls it with its operation on the selected one.
    """

    def branch(self, run: Callable[[Operand], Array]) -> Array:
        """Applies `run` to the selected operand."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackMember(Member):
    """A member that is a weight, or a vector such as a bias.

    A loop over stacked layers would copy each layer's weights out of the stack; a backend that is
    told the stack and a number reads them in place. The others take a copy.

    Attributes:
        whole: an array or a weight, with a leading axis of members.
        index: static or traced; within the stack.
    """

    whole: Array | StoredOperand
    index: Int[Array, ""]

    def reshape(self, *shape: int) -> StackMember:
        """A vector in another shape."""
        vectors = cast(Array, self.whole)
        return replace(self, whole=vectors.reshape(vectors.shape[0], *shape))

    def in_stack(self) -> tuple[StoredOperand, Int[Array, ""] | None]:
        return cast(StoredOperand, self.whole), self.index


def taken(w: T | StackMember) -> T:
    """A copy of the member; what is not `StackMember` as it is."""
    if not isinstance(w, StackMember):
        return w
    if isinstance(w.whole, StoredOperand):
        return cast(T, w.whole.member(w.index))
    return cast(T, w.whole[w.index])


def in_place(vector: Array | StackMember | None, is_readable: Callable[[Array], bool]) -> Any:
    """The whole stack that a vector lies in where a kernel can read it, else the vector."""
    if isinstance(vector, StackMember) and is_readable(cast(Array, vector.whole)):
        return vector.whole
    return taken(vector)


def at(leaf: Array | Operand, index: Any) -> Operand:
    """`Operand.at` of a leaf: a plain array may be a weight or a vector."""
    return leaf.at(index) if isinstance(leaf, Operand) else StackMember(leaf, index)


def as_operand(leaf: Array | Operand, *, contract: int = 1, stack: int = 0) -> Operand:
    """A leaf as an operand; one that is an `Operand` knows its axes.

    Args:
        leaf: an array is [*stack, *in, *out].
        contract: number of axes in `*in`.
        stack: number of axes in `*stack`.
    """
    if isinstance(leaf, StackMember) and not isinstance(leaf.whole, Operand):
        return replace(leaf, whole=_dense(leaf.whole, contract, stack + 1))
    return leaf if isinstance(leaf, Operand) else _dense(leaf, contract, stack)


def _dense(array: Array, contract: int, stack: int) -> Dense:
    lead, shape = array.shape[:stack], array.shape[stack:]
    in_shape, out_shape = tuple(shape[:contract]), tuple(shape[contract:])
    flat = (*lead, math.prod(in_shape), math.prod(out_shape))
    return Dense(array if array.shape == flat else array.reshape(flat), in_shape, out_shape)


def as_table(leaf: Array | Operand) -> Operand:
    """An embedding as a weight from hidden to vocabulary; an array is [vocab, hidden]."""
    if isinstance(leaf, Operand):
        return leaf
    return Dense(leaf, leaf.shape[1:], leaf.shape[:1], table=True)


def split_leaf(leaf: Any, axes: Axes, stack: int, lead: Axes = ()) -> Any:
    """`Operand.split` of a leaf: a plain array has an axis for each of `axes`."""
    if isinstance(leaf, Operand):
        return leaf.split(axes, stack, lead)
    return PartitionSpec(*lead, *axes)


def packing_of(leaf: Any) -> str | None:
    """Order of a leaf's packed codes; None if nothing is packed."""
    return leaf.packing if isinstance(leaf, StoredOperand) else None
