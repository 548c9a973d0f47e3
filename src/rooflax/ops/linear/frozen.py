"""`Frozen`: a weight of any format that is not trained, with gradients through activations alone.

The backward pass makes the weight's numbers anew, so that of a quantized model never more than one
matrix is there in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import native
from rooflax.ops.dot import dot_general
from rooflax.ops.linear import cpu
from rooflax.ops.linear.api import take
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import applied
from rooflax.ops.weights import (
    Branch,
    Dense,
    Fused,
    Operand,
    Quantized,
    StackMember,
    StoredOperand,
    Wrapper,
    at,
    taken,
)
from rooflax.ops.weights.rotation import BLOCK, rotate

STATIC = {"static": True}
SET_BYTES = 4096
"""Rows of a matrix that are a multiple of them apart share the sets of a first cache: XLA's product
with its transpose then takes a third longer than the native kernel's."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(
    x: Float[Array, "rows in"],
    w: StoredOperand,
    index: Int[Array, ""] | None = None,
    is_split: bool = False,
) -> Float[Array, "rows out"]:
    """x times the numbers of w, in float32; activations are never rounded, whatever the format.

    Its gradient is that with respect to x, by a product with the transposed numbers.

    Args:
        index: w is a stack of weights, and this is the number of the one that is meant.
        is_split: as `Frozen` has it.
    """
    numbers = _numbers(w, index, x, is_split)
    return dot_general(x.astype(jnp.float32), numbers, (((1,), (0,)), ((), ())))


Kept = tuple[StoredOperand, Int[Array, ""] | None, Array]


def _forward(x: Array, w: StoredOperand, index: Array | None, is_split: bool) -> tuple[Array, Kept]:
    return product(x, w, index, is_split), (w, index, jnp.zeros(0, x.dtype))


def _backward(is_split: bool, kept: Kept, dy: Array) -> tuple[Array, None, None]:
    w, index, like = kept
    return _transposed(dy, w, index, is_split).astype(like.dtype), None, None


def _transposed(
    dy: Float[Array, "rows out"], w: StoredOperand, index: Int[Array, ""] | None, is_split: bool
) -> Float[Array, "rows in"]:
    """dy times the transposed numbers of w."""
    numbers = _numbers(w, index, dy, is_split)
    is_table = isinstance(w, Dense) and w.table
    shares_sets = numbers.shape[1] * 4 % SET_BYTES == 0
    if shares_sets and not is_table and not is_split and native.is_ready():
        return cpu.matmul_transposed(dy, numbers)
    return dot_general(dy, numbers, (((1,), (1,)), ((), ())))


def _numbers(
    w: StoredOperand,
    index: Int[Array, ""] | None,
    x: Float[Array, "rows width"],
    is_split: bool,
) -> Float[Array, "in out"]:
    """Numbers of w, or of one of its stack, made once x is there.

    XLA would make the numbers of all weights when a step begins, and keep those of the forward pass
    for the backward pass; on CPU it drops barriers. So the native kernel has an argument of x that
    it does not read, and else x has a part in the numbers, which is zero.
    """
    if _has_codes(w) and not is_split and native.is_ready():
        found = cpu.numbers(w, index, after=x[0, :1].astype(jnp.float32))
        return rotate(found.T).T if w.rotates_inputs else found
    one = w if index is None else w.member(index)
    if one.dtype == jnp.float32 and isinstance(one, Dense):
        return one.numbers()
    zero = x[0, 0].astype(jnp.float32) * 0
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), one).numbers()


def _has_codes(w: StoredOperand) -> bool:
    """Whether the native library decodes w."""
    return isinstance(w, Quantized) and not w.is_matrix and native.unreadable(w.code) is None


product.defvjp(_forward, _backward)


def lengths(
    w: Frozen, a: Float[Array, "in rank"], b: Float[Array, "rank out"]
) -> Float[Array, " out"]:
    """Length of each output's weights in W + A B, without a gradient, as DoRA divides by it.

        |w + A b|^2 = |w|^2 + 2 b . (A' w) + b . (A' A) b

    so that the sum itself is never made.
    """
    a, b = jax.lax.stop_gradient((a, b))
    rows = a.T
    product = _product(rows, w.operand, w.is_split)
    added = jnp.sum(b * (2 * product + rows @ a @ b), axis=0)
    squares = _squares(rows, w.operand, w.is_split)
    return jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(squares + added, 0.0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen(Wrapper):
    """A weight that training leaves as it is.

    Attributes:
        base: an array [*in, *out] or an operand; a table is [vocab, hidden].
        is_table: it makes logits; an array is [vocab, hidden].
        is_split: it is on several devices, among which XLA does not split native kernels.
    """

    base: Any
    in_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    out_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    is_table: bool = field(default=False, metadata=STATIC)
    is_split: bool = field(default=False, metadata=STATIC)

    def at(self, index: Any) -> Frozen:
        return replace(self, base=at(self.base, index))

    def matmul(
        self,
        x: Float[Array, "rows width"],
        bias: Float[Array, " out"] | StackMember | None = None,
        *,
        prologue: Any,
        residual: Float[Array, "rows out"] | None,
        num_rows: Int[Array, ""] | None,
        dtype: Any,
        implementation: str | None,
    ) -> Float[Array, "rows out"]:
        """`linear.api.matmul` by XLA."""
        del num_rows, implementation  # padding is computed like the rest
        y = _product(applied(prologue, x), self.operand, self.is_split)
        y = y if bias is None else y + taken(bias).astype(jnp.float32)[None, :]
        y = y.astype(dtype)
        return y if residual is None else y + residual

    def take(self, ids: Int[Array, " n"], **options: Any) -> Float[Array, "n in"]:
        return take(self.operand, ids, **options)


def _squares(x: Float[Array, "rows in"], w: Operand, is_split: bool) -> Float[Array, " out"]:
    """Sum over the inputs of the squares of W's numbers, made once x is there."""
    if isinstance(w, Fused):
        return w.together([_squares(x, part, is_split)[None] for part in w.parts])[0]
    if isinstance(w, Branch):
        return w.branch(lambda one: _squares(x, taken(one), is_split))
    one, index = w.in_stack()
    squares = jnp.sum(jnp.square(_numbers(one, index, x, is_split)), axis=0)
    return squares * BLOCK if one.rotates_inputs else squares


def _product(x: Float[Array, "rows in"], w: Operand, is_split: bool) -> Float[Array, "rows out"]:
    if isinstance(w, Fused):
        return w.together([_product(x, part, is_split) for part in w.parts])
    if isinstance(w, Branch):
        # Its copy: what a branch keeps for the backward pass is kept for each layer.
        return w.branch(lambda one: _product(x, taken(one), is_split))
    one, index = w.in_stack()
    return product(rotated(x, one), one, index, is_split)


def rotated(x: Float[Array, "rows in"], w: StoredOperand) -> Float[Array, "rows in"]:
    """x as the numbers of w meet it."""
    return rotate(x.astype(jnp.float32)) if w.rotates_inputs else x


@jax.custom_vjp
def adapted(
    x: Float[Array, "rows in"],
    rows: Float[Array, "rows in"] | None,
    w: StoredOperand,
    index: Int[Array, ""] | None,
    a: Float[Array, "in rank"],
    b: Float[Array, "rank out"],
) -> Float[Array, "rows out"]:
    """x W + (rows A) B in float32, on CPU; without `rows`, those of x.

    The native kernel adds the adapter's part, and without `rows` its part of x's gradient: XLA
    would keep both parts, and add them wherever their sum is read.

    Args:
        index: as `product` has it.
    """
    return _adapted_forward(x, rows, w, index, a, b)[0]


def _adapted_forward(
    x: Array, rows: Array | None, w: StoredOperand, index: Array | None, a: Array, b: Array
) -> tuple[Array, tuple[Any, ...]]:
    few = _times(x if rows is None else rows, a)
    y = _native(few, b, product(x, w, index))
    like = jnp.zeros(0, x.dtype)
    return y, (x if rows is None else like, rows, w, index, a, b, few, like)


def _adapted_backward(kept: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, rows, w, index, a, b, few, like = kept
    d_few = _times(dy, b.T)
    seen = (x if rows is None else rows).astype(jnp.float32)
    d_a, d_b = _native(d_few.T, seen).T, _native(few.T, dy)
    dx = _transposed(dy, w, index, is_split=False)
    if rows is None:
        return _native(d_few, a.T, dx).astype(like.dtype), None, None, None, d_a, d_b
    d_rows = _times(d_few, a.T).astype(rows.dtype)
    return dx.astype(like.dtype), d_rows, None, None, d_a, d_b


def _times(x: Float[Array, "rows n"], a: Float[Array, "n m"]) -> Float[Array, "rows m"]:
    return dot_general(x.astype(jnp.float32), a, (((1,), (0,)), ((), ())))


def _native(
    x: Float[Array, "rows n"], a: Float[Array, "n m"], y: Float[Array, "rows m"] | None = None
) -> Float[Array, "rows m"]:
    """x a + y by the native kernel."""
    return cpu.matmul(LinearArgs(x, Dense(a, a.shape[:1], a.shape[1:]), residual=y))


adapted.defvjp(_adapted_forward, _adapted_backward)
