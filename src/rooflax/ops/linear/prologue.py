"""Prologues: operations on the rows of a matmul before it, a norm or an activation.

Called, each is its plain meaning; a backend that can do it while it reads the rows looks at the
fields instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
from jaxtyping import Array, Float

from rooflax.ops.activation import ACTIVATIONS, clamped_swiglu, gated
from rooflax.ops.norm import layer_norm, rms_norm
from rooflax.ops.weights import StackMember, taken

P = TypeVar("P")
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """RMSNorm; with a bias LayerNorm."""

    weight: Float[Array, " hidden"] | StackMember
    bias: Float[Array, " hidden"] | StackMember | None = None
    eps: float = field(default=1e-5, metadata=STATIC)

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        weight, bias = taken(self.weight), taken(self.bias)
        if bias is None:
            return rms_norm(x, weight, eps=self.eps)
        return layer_norm(x, weight, bias, eps=self.eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activation:
    """One of ops.activation by its name; gated ones take [..., 2, mlp], gate and up."""

    name: str = field(metadata=STATIC)
    gated: bool = field(default=False, metadata=STATIC)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*batch mlp"]:
        return gated(self.name, x) if self.gated else ACTIVATIONS[self.name](x)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS's gate, from [..., 2, mlp]."""

    alpha: float = field(default=1.702, metadata=STATIC)
    limit: float = field(default=7.0, metadata=STATIC)

    @property
    def gated(self) -> bool:
        return True

    def __call__(self, x: Float[Array, "*batch 2 mlp"]) -> Float[Array, "*batch mlp"]:
        return clamped_swiglu(x, alpha=self.alpha, limit=self.limit)


Prologue = Norm | Activation | ClampedSwiglu


def taken_prologue(prologue: P) -> P:
    """Copies the prologue's weights out of stacks."""
    if not isinstance(prologue, Norm):
        return prologue
    return replace(prologue, weight=taken(prologue.weight), bias=taken(prologue.bias))


def applied(prologue: Prologue | None, x: Float[Array, "rows width"]) -> Float[Array, "rows in"]:
    """The rows that a matmul sees."""
    if prologue is None:
        return x
    return prologue(x.reshape(x.shape[0], 2, -1) if getattr(prologue, "gated", False) else x)
