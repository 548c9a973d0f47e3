"""Arguments of a backend of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.prologue import Norm
from rooflax.ops.real_rows import NumRows
from rooflax.ops.weights import Operand, StackMember, StoredOperand, as_operand, taken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    """One matmul of all experts: a stack of matrices, and of biases.

    Attributes:
        w: [experts, in, out], or with `index` one of a stack of those.
        bias: [experts, *out]; None is none.
    """

    w: StoredOperand
    index: Int[Array, ""] | None
    bias: Array | StackMember | None

    @property
    def stack(self) -> StoredOperand:
        """The experts alone, copied out of their stack."""
        return self.w if self.index is None else self.w.member(self.index)

    @property
    def biases(self) -> Array | None:
        """[experts, out] of these experts alone; None is none."""
        if self.bias is None:
            return None
        bias = taken(self.bias)
        return bias.reshape(bias.shape[0], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoeArgs:
    """The arguments of `experts`, checked."""

    x: Float[Array, "tokens hidden"]
    expert_ids: Int[Array, "tokens chosen"]
    expert_weights: Float[Array, "tokens chosen"]
    up: Experts
    down: Experts
    activation: Callable[[jax.Array], jax.Array] = field(metadata={"static": True})
    norm: Norm | None = None
    method: str = field(default="grouped", metadata={"static": True})
    num_tokens: NumRows = None
    residual: Float[Array, "tokens hidden"] | None = None

    @staticmethod
    def of(
        x: Float[Array, "tokens hidden"],
        expert_ids: Int[Array, "tokens chosen"],
        expert_weights: Float[Array, "tokens chosen"],
        gate_up: Array | Operand,
        gate_up_bias: Array | StackMember | None,
        down: Array | Operand,
        down_bias: Array | StackMember | None,
        **options: Any,
    ) -> MoeArgs:
        """Reads the leaves."""
        up = Experts(*as_operand(gate_up, stack=1).in_stack(), gate_up_bias)
        out = Experts(*as_operand(down, stack=1).in_stack(), down_bias)
        return MoeArgs(x, expert_ids, expert_weights, up, out, **options)

    @property
    def num_experts(self) -> int:
        return self.up.w.stack[-1]

    def onto(self, out: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """The residual and what the experts give."""
        return out if self.residual is None else self.residual + out

    @property
    def rows(self) -> Float[Array, "tokens hidden"]:
        """The tokens, normalised."""
        return self.x if self.norm is None else self.norm(self.x)
