"""`Adapted`: a weight of any format with a low-rank adapter (LoRA) beside it, never merged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import native
from rooflax.ops.linear.api import matmul, take
from rooflax.ops.linear.frozen import Frozen, adapted, lengths, rotated
from rooflax.ops.linear.prologue import applied
from rooflax.ops.weights import (
    StackMember,
    StoredOperand,
    Wrapper,
    as_operand,
    at,
    taken,
)

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Zeros in place of a share of what A multiplies, the rest as much larger; in training.

    Attributes:
        seeds: of each row of the batch, whose tokens lie one after the other.
        number: of the adapter.
        rate: the share.
        seed: of the run.
    """

    seeds: Int[Array, " batch"]
    number: Int[Array, "*stack"] | StackMember
    rate: float = field(metadata=STATIC)
    seed: int = field(metadata=STATIC)

    def __call__(self, x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
        weight_key = jax.random.fold_in(jax.random.key(self.seed), taken(self.number))
        keys = jax.vmap(lambda seed: jax.random.fold_in(weight_key, seed))(self.seeds)
        shape = x.shape[0] // self.seeds.shape[0], x.shape[1]
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, shape))(keys)
        return jnp.where(keep.reshape(x.shape), x / (1 - self.rate), jnp.zeros((), x.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted(Wrapper):
    """y = x W + (x A) B, x being what the prologue makes of the rows.

    x A and its product with B are float32 whatever W's format is; the sum has the dtype of y.

    Attributes:
        base: W, an array [*in, *out] or an operand; a table is [vocab, hidden].
        a: float32 [in, rank].
        b: float32 [rank, out], the adapter's scale included.
        columns: what each output of x W + (x A) B is multiplied by before the bias, [out], as DoRA
            has it; None is 1.
        magnitude: of DoRA in training, beside a `Frozen` base and in place of `columns`: the length
            that each output's weights are brought to, [out]; 0 leaves an output as it is.
        dropout: of what A multiplies; None is none.
        is_table: the base is an embedding whose rows are looked up without the adapter, which is
            the head's.
    """

    base: Any
    a: Float[Array, "*stack in rank"] | StackMember
    b: Float[Array, "*stack rank out"] | StackMember
    columns: Float[Array, "*stack out"] | StackMember | None
    in_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    out_shape: tuple[int, ...] = field(metadata=STATIC)  # type: ignore[assignment]
    is_table: bool = field(default=False, metadata=STATIC)
    dropout: Dropout | None = None
    magnitude: Float[Array, "*stack out"] | StackMember | None = None

    def at(self, index: Any) -> Adapted:
        """One of stacked layers, left where it lies."""
        names = ("base", "a", "b", "columns", "magnitude")
        parts = {name: getattr(self, name) for name in names}
        members: dict[str, Any] = {k: v if v is None else at(v, index) for k, v in parts.items()}
        if self.dropout is not None:
            members["dropout"] = replace(self.dropout, number=at(self.dropout.number, index))
        return replace(self, **members)

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
        """`linear.api.matmul` of the sum."""
        options: dict[str, Any] = {"num_rows": num_rows, "implementation": implementation}
        y = self._summed_natively(x, prologue)
        if y is not None:
            return _finished(y, self._columns(), bias, residual, dtype)
        if self.dropout is None:
            few = matmul(as_operand(self.a), x, prologue=prologue, dtype=jnp.float32, **options)
        else:
            rows = self.dropout(applied(prologue, x))
            few = matmul(as_operand(self.a), rows, dtype=jnp.float32, **options)
        plain: dict[str, Any] = {"prologue": prologue, "dtype": dtype} | options
        if self._trains_natively:
            options["implementation"] = "trained"
        columns = self._columns()
        if columns is None:
            y = matmul(self.operand, x, bias, residual=residual, **plain)
            return matmul(as_operand(self.b), few, residual=y, dtype=y.dtype, **options)
        y = matmul(self.operand, x, **plain)
        y = matmul(as_operand(self.b), few, residual=y, dtype=y.dtype, **options)
        return _finished(y, columns, bias, residual, dtype)

    def _summed_natively(self, x: Float[Array, "rows width"], prologue: Any) -> Array | None:
        """x W + (x A) B in float32, as training beside one frozen weight has it on CPU."""
        if not self._trains_natively:
            return None
        operand = self.base.operand
        if not isinstance(operand, StoredOperand | StackMember):  # several side by side
            return None
        one, index = operand.in_stack()
        rows = applied(prologue, x)
        seen = rows if self.dropout is None else self.dropout(rows)
        apart = seen if self.dropout is not None or one.rotates_inputs else None
        return adapted(rotated(rows, one), apart, one, index, taken(self.a), taken(self.b))

    @property
    def _trains_natively(self) -> bool:
        """Whether (x A) B is added by the native kernel in training: see `frozen.adapted`."""
        base = self.base
        return isinstance(base, Frozen) and not base.is_split and native.is_ready()

    def _columns(self) -> Float[Array, " out"] | None:
        if self.magnitude is None:
            return None if self.columns is None else taken(self.columns)
        wanted = taken(self.magnitude)
        is_free = wanted == 0
        length = jnp.where(is_free, 1.0, lengths(self.base, taken(self.a), taken(self.b)))
        return jnp.where(is_free, 1.0, wanted / length)

    def take(self, ids: Int[Array, " n"], **options: Any) -> Float[Array, "n in"]:
        """Rows of the table, which the adapter leaves alone."""
        assert self.is_table, "an adapter of an embedding is not read"
        return take(self.operand, ids, **options)


def _finished(
    y: Float[Array, "rows out"],
    columns: Float[Array, " out"] | None,
    bias: Float[Array, " out"] | StackMember | None,
    residual: Float[Array, "rows out"] | None,
    dtype: Any,
) -> Float[Array, "rows out"]:
    """The sum times `columns`, with bias and residual, in `dtype`."""
    y = y.astype(jnp.float32)
    y = y if columns is None else y * columns[None, :]
    y = y if bias is None else y + taken(bias).astype(jnp.float32)[None, :]
    y = y.astype(dtype)
    return y if residual is None else y + residual
