"""Per-layer embeddings: each layer adds a token's embedding of its own to the residual stream.

Source: transformers, models/gemma4/modeling_gemma4.py; Gemma Team, Gemma 3n, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.nn import mesh
from rooflax.nn.layers import LayerWeights
from rooflax.nn.tensor_layouts import Linear
from rooflax.nn.weights import WeightLine
from rooflax.nn.wiring import Context, Hidden, NormKind, WeightTable
from rooflax.ops.linear import Activation

LAYER = "model.layers.{i}"


@dataclass(frozen=True)
class PerLayer:
    """The per-layer embedding e of a token, `width` numbers from its id and its embedding x, and
    how a layer adds it to its result y.

        e = (table[id] * width^1/2 + norm(x @ projection * hidden^-1/2)) * 2^-1/2
        y + norm((activation(y @ gate) * e) @ up)

    Attributes:
        num_layers: of the whole model, also where it is cut.
        activation: a name of ops.activation.
    """

    width: int
    num_layers: int
    norm: NormKind
    activation: str

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return {
            "per_layer": self.width,
            "depth": self.num_layers,
            "per_layers": self.num_layers * self.width,
        }

    def table(self) -> WeightTable:
        """The lines outside the layers."""
        embed, projection = "embed_tokens_per_layer", "model.per_layer_model_projection.weight"
        axes = "hidden -> depth per_layer"
        return {
            "per_layer.embed": WeightLine("vocab per_layers", f"model.{embed}.weight"),
            "per_layer.projection": WeightLine(axes, projection, Linear()),
        } | self.norm.table("per_layer.norm", "model.per_layer_projection_norm", "per_layer")

    def layer_table(self) -> WeightTable:
        """A layer's."""
        gate, up = (f"{LAYER}.per_layer_{name}.weight" for name in ("input_gate", "projection"))
        return {
            "per_layer.gate": WeightLine("hidden -> per_layer", gate, Linear()),
            "per_layer.up": WeightLine("per_layer -> hidden", up, Linear(), "residual"),
        } | self.norm.table("per_layer.norm", f"{LAYER}.post_per_layer_input_norm")

    def of_tokens(
        self,
        weights: Mapping[str, Any],
        tokens: Int[Array, "B T"],
        x: Hidden,
        context: Context,
    ) -> Float[Array, "depth B T width"]:
        """Each layer's input from its own embedding of the tokens.

        Args:
            x: the tokens' embeddings.
        """
        rows = mesh.embed(
            weights["per_layer.embed"],
            tokens,
            context.shards,
            dtype="float32",
            num_rows=context.num_tokens,
            kernels=context.options.kernels,
        )
        rows = rows.reshape(*tokens.shape, self.num_layers, self.width) * math.sqrt(self.width)
        projected = context.linear(x, weights["per_layer.projection"]) * x.shape[-1] ** -0.5
        norm = self.norm.of(weights, "per_layer.norm")
        projected = context.norm(projected.astype(jnp.float32), norm)
        return jnp.moveaxis(((rows + projected) * 2**-0.5).astype(x.dtype), 2, 0)

    def added(
        self, w: LayerWeights, y: Hidden, layer_input: Float[Array, "B T width"], context: Context
    ) -> Hidden:
        """A layer's result with the gated input of its tokens added.

        Args:
            layer_input: this layer's of `of_tokens`.
        """
        gate = context.linear(y, w["per_layer.gate"])
        pair = jnp.stack((gate, layer_input), axis=-2)
        activation = Activation(self.activation, gated=True)
        h = context.linear(pair, w["per_layer.up"], prologue=activation)
        return y + context.norm(h, self.norm.of(w, "per_layer.norm"))
