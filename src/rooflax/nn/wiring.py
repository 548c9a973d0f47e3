"""Shared parts of layers: their context, norms, and the residual connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.nn import mesh
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layers import LayerWeights
from rooflax.nn.rope import Rope
from rooflax.nn.tensor_layouts import PlusOne, TensorLayout
from rooflax.nn.weights import WeightLine
from rooflax.ops.linear import Norm, linear
from rooflax.ops.norm import norm as ops_norm
from rooflax.ops.weights import taken

Hidden = Float[Array, "B T D"]
WeightTable = dict[str, WeightLine]


@dataclass(frozen=True)
class Context:
    """Context that the layers of a step share.

    Attributes:
        num_tokens: how many leading tokens are real; None is all.
        rope: by RoPE and head_dim, cosines and sines at the tokens' positions,
            [B, T, head_dim / 2], and the queries' factor, [B, T, 1], or None.
        bias: of scores, by distance; see `nn.distances`.
    """

    options: ExecutionOptions
    shards: mesh.Shards | None
    num_tokens: Int[Array, ""] | None
    rope: Mapping[tuple[Rope, int], tuple[Array, Array, Array | None]]
    bias: Float[Array, "N distances"] | None = None

    @cached_property
    def linear(self) -> partial[Array]:
        """ops.linear of the real tokens, by the step's kernels."""
        return partial(linear, num_rows=self.num_tokens, implementation=self.options.kernels)

    def norm(self, x: Array, norm: Norm) -> Array:
        """x normed, by the step's kernels; before a matmul `linear`'s prologue does it."""
        weights = taken(norm.weight), taken(norm.bias)
        return ops_norm(x, *weights, eps=norm.eps, implementation=self.options.kernels)

    def on_one_shard(self, x: Any) -> Any:
        """Adds x on one tensor shard only, before `all_reduce`."""
        return mesh.on_one_shard(x, self.shards)

    def all_reduce(self, x: Array, *axes: str) -> Array:
        """The sum over the tensor shards, and over those of other axes."""
        return mesh.all_reduce(x, self.shards, (mesh.TENSOR, *axes))


@dataclass(frozen=True)
class NormKind:
    """RMSNorm or LayerNorm.

    Attributes:
        bias: of a LayerNorm.
        centered: a LayerNorm.
        plus_one: checkpoints have the weight less one.
    """

    eps: float
    bias: bool = False
    plus_one: bool = False
    centered: bool = False

    def table(self, key: str, hf: str, axis: str = "hidden") -> WeightTable:
        layout = PlusOne() if self.plus_one else TensorLayout()
        lines = {key: WeightLine(axis, f"{hf}.weight", layout, "ones")}
        if self.bias:
            lines[f"{key}_bias"] = WeightLine("hidden", f"{hf}.bias", init="zeros")
        return lines

    def of(self, weights: Mapping[str, Any], key: str) -> Norm:
        bias = weights.get(f"{key}_bias")
        if self.centered and bias is None:
            bias = jax.tree.map(jnp.zeros_like, weights[key])
        return Norm(weights[key], bias if self.centered else None, self.eps)


@dataclass(frozen=True)
class Wiring:
    """Residual connection of a branch (attention or feed-forward network).

    Attributes:
        before: a norm of what the branch reads.
        after: a norm of what it gives, after the sum over tensor shards.
        scale: of what is added.
        outer: a norm of the sum with the residual stream, as encoders have it.
    """

    before: bool = True
    after: bool = False
    scale: float = 1.0
    outer: bool = False

    def table(self, norm: NormKind, key: str, before: str, after: str) -> WeightTable:
        """The norms' lines, by their names in a layer of the checkpoint."""
        lines = norm.table(f"{key}.norm", f"model.layers.{{i}}.{before}") if self.before else {}
        if self.after or self.outer:
            lines |= norm.table(f"{key}.post_norm", f"model.layers.{{i}}.{after}")
        return lines

    def prologue(self, norm: NormKind, key: str, w: LayerWeights) -> Norm | None:
        """The norm of what the branch reads."""
        return norm.of(w, f"{key}.norm") if self.before else None

    def residual(self, x: Hidden) -> Hidden | None:
        """Residual that the branch's last matmul adds; None leaves that to `joined`."""
        return None if self.after or self.scale != 1.0 else x

    def joined(
        self, x: Hidden, h: Hidden, norm: NormKind, key: str, w: LayerWeights, context: Context
    ) -> Hidden:
        """x + scale * h, the branch's result."""
        if self.after:
            h = context.norm(h, norm.of(w, f"{key}.post_norm"))
        h = x + h * self.scale if self.residual(x) is None else h
        return context.norm(h, norm.of(w, f"{key}.post_norm")) if self.outer else h


PRE, POST, SANDWICH = Wiring(), Wiring(before=False, after=True), Wiring(after=True)
OUTER = Wiring(before=False, outer=True)
