"""The parts of a decoder layer: attention, and a feed-forward network, dense or of experts.

A part owns its lines of the weight table, the sizes of its axes and its forward pass. The lines
bear the names of LLaMA's checkpoints; a family with other names maps them (`Decoder.names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.nn import mesh
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layers import Attend, LayerWeights
from rooflax.nn.rope import Rope
from rooflax.nn.weights import QKV, Flat, GateUp, InterleavedGateUp, Linear, Weight
from rooflax.ops.linear import Activation, ClampedSwiglu, Norm, linear
from rooflax.ops.moe import experts, route
from rooflax.ops.norm import rms_norm
from rooflax.ops.rope import apply_rope
from rooflax.ops.weights import taken

Hidden = Float[Array, "B T D"]
Table = dict[str, Weight]
ATTENTION, MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"


@dataclass(frozen=True)
class Context:
    """What the layers of a step share.

    Attributes:
        num_tokens: how many leading tokens are real; None is all.
        rope: cosines and sines at the tokens' positions, [B, T, head_dim / 2].
    """

    options: ExecutionOptions
    shards: mesh.Shards | None
    num_tokens: Int[Array, ""] | None
    rope: Mapping[Rope, tuple[Array, Array]]

    def linear(self, x: Array, weight: Any, bias: Any = None, **how: Any) -> Array:
        """ops.linear of the real tokens, by the step's kernels."""
        how |= {"num_rows": self.num_tokens, "implementation": self.options.kernels}
        return linear(x, weight, bias, **how)

    def on_one_shard(self, x: Any) -> Any:
        """What is added before `all_reduce`: on one tensor shard only."""
        return mesh.on_one_shard(x, self.shards)

    def all_reduce(self, x: Array, *axes: str) -> Array:
        """The sum over the tensor shards, and over those of other axes."""
        return mesh.all_reduce(x, self.shards, (mesh.TENSOR, *axes))


@dataclass(frozen=True)
class NormKind:
    """RMSNorm; with a bias LayerNorm."""

    eps: float
    bias: bool = False

    def table(self, key: str, hf: str) -> Table:
        lines = {key: Weight("hidden", f"{hf}.weight", init="ones")}
        if self.bias:
            lines[f"{key}_bias"] = Weight("hidden", f"{hf}.bias", init="zeros")
        return lines

    def of(self, weights: Mapping[str, Any], key: str) -> Norm:
        return Norm(weights[key], weights.get(f"{key}_bias"), self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with its norm before it and the residual behind it.

    Attributes:
        window: how many tokens a query sees, its own included; None is all.
        rope: None leaves positions out.
        sinks: a logit per query head that takes part in the softmax and has no value.
        qk_norm: epsilon of an RMSNorm of every query and key head before RoPE; None is none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormKind
    rope: Rope | None = None
    window: int | None = None
    sinks: bool = False
    qk_norm: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return {
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "qkv_group": self.num_heads // self.num_kv_heads + 2,
            "head_dim": self.head_dim,
        }

    def table(self) -> Table:
        names = tuple(f"{ATTENTION}.{part}_proj" for part in "qkv")
        weights, biases = (tuple(f"{n}.{end}" for n in names) for end in ("weight", "bias"))
        lines = self.norm.table("attn.norm", "model.layers.{i}.input_layernorm")
        lines["attn.qkv"] = Weight("hidden -> kv_heads qkv_group head_dim", weights, QKV())
        if self.qkv_bias:
            axes = "kv_heads qkv_group head_dim"
            lines["attn.qkv_bias"] = Weight(axes, biases, QKV(bias=True), "zeros")
        if self.qk_norm is not None:
            for part in "qk":
                hf = f"{ATTENTION}.{part}_norm.weight"
                lines[f"attn.{part}_norm"] = Weight("head_dim", hf, init="ones")
        if self.sinks:
            lines["attn.sinks"] = Weight("heads", f"{ATTENTION}.sinks")
        output = f"{ATTENTION}.o_proj"
        axes = "heads head_dim -> hidden"
        lines["attn.o"] = Weight(axes, f"{output}.weight", Linear(), "residual")
        if self.output_bias:
            lines["attn.o_bias"] = Weight("hidden", f"{output}.bias", Flat(), "zeros")
        return lines

    def __call__(self, w: LayerWeights, x: Hidden, attend: Attend, context: Context) -> Hidden:
        norm = self.norm.of(w, "attn.norm")
        qkv = context.linear(x, w["attn.qkv"], w.get("attn.qkv_bias"), prologue=norm)
        q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
        if self.qk_norm is not None:
            q = rms_norm(q, taken(w["attn.q_norm"]), eps=self.qk_norm)
            k = rms_norm(k, taken(w["attn.k_norm"]), eps=self.qk_norm)
        if self.rope is not None:
            cos, sin = context.rope[self.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q = q.reshape(*q.shape[:2], -1, self.head_dim)
        scale, sinks = self.head_dim**-0.5, w.get("attn.sinks")
        h = attend(q, k[:, :, :, 0], v[:, :, :, 0], scale=scale, sinks=sinks)
        o_bias, residual = context.on_one_shard(w.get("attn.o_bias")), context.on_one_shard(x)
        x = context.linear(h, w["attn.o"], o_bias, contract=2, residual=residual)
        return context.all_reduce(x)


@dataclass(frozen=True)
class Mlp:
    """Two matmuls with an activation between them, its norm before and the residual behind.

    Attributes:
        activation: a name of ops.activation.
        gated: the first matmul gives a gate and what it multiplies.
    """

    width: int
    norm: NormKind
    activation: str
    gated: bool = True
    bias: bool = False

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return {"mlp": self.width} | ({"gate_up": 2} if self.gated else {})

    @property
    def _first(self) -> str:
        return "mlp.gate_up" if self.gated else "mlp.up"

    def table(self) -> Table:
        lines = self.norm.table("mlp.norm", "model.layers.{i}.post_attention_layernorm")
        parts = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        weights, biases = (tuple(f"{MLP}.{p}.{end}" for p in parts) for end in ("weight", "bias"))
        out, layout = ("gate_up mlp", GateUp()) if self.gated else ("mlp", Linear())
        flat = GateUp(bias=True) if self.gated else Flat()
        lines[self._first] = Weight(f"hidden -> {out}", weights, layout)
        if self.bias:
            lines[f"{self._first}_bias"] = Weight(out, biases, flat, "zeros")
        down = f"{MLP}.down_proj"
        lines["mlp.down"] = Weight("mlp -> hidden", f"{down}.weight", Linear(), "residual")
        if self.bias:
            lines["mlp.down_bias"] = Weight("hidden", f"{down}.bias", Flat(), "zeros")
        return lines

    def __call__(self, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        norm, first = self.norm.of(w, "mlp.norm"), self._first
        h = context.linear(x, w[first], w.get(f"{first}_bias"), prologue=norm)
        down_bias, residual = context.on_one_shard(w.get("mlp.down_bias")), context.on_one_shard(x)
        activation = Activation(self.activation, gated=self.gated)
        how = {"prologue": activation, "residual": residual}
        x = context.linear(h, w["mlp.down"], down_bias, **how)
        return context.all_reduce(x)


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: a router, and `experts_per_token` of `num_experts` networks per token.

    Attributes:
        width: of one expert.
    """

    num_experts: int
    experts_per_token: int
    width: int
    norm: NormKind
    activation: ClampedSwiglu

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        count = self.num_experts
        return {"mlp": self.width, "gate_up": 2, "experts": count, "routes": count}

    def table(self) -> Table:
        stored, split = f"{MLP}.experts", InterleavedGateUp()
        lines = self.norm.table("mlp.norm", "model.layers.{i}.post_attention_layernorm")
        lines |= {
            "mlp.router": Weight("hidden -> routes", f"{MLP}.router.weight", Linear()),
            "mlp.router_bias": Weight("routes", f"{MLP}.router.bias", init="zeros"),
            "mlp.gate_up": Weight(
                "experts | hidden -> gate_up mlp", f"{stored}.gate_up_proj", split
            ),
            "mlp.gate_up_bias": Weight(
                "experts gate_up mlp", f"{stored}.gate_up_proj_bias", split, "zeros"
            ),
            "mlp.down": Weight("experts | mlp -> hidden", f"{stored}.down_proj", init="residual"),
            "mlp.down_bias": Weight("experts hidden", f"{stored}.down_proj_bias", init="zeros"),
        }
        return lines

    def __call__(self, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        norm, rows = self.norm.of(w, "mlp.norm"), x.reshape(-1, x.shape[-1])
        router = context.linear(rows, w["mlp.router"], w["mlp.router_bias"], prologue=norm)
        expert_ids, routing_weights = route(router, self.experts_per_token)
        num_local = w["mlp.gate_up"].shape[0]
        expert_ids, routing_weights = mesh.local_experts(
            expert_ids, routing_weights, num_local, context.shards
        )
        h = experts(
            rows,
            expert_ids,
            routing_weights,
            w["mlp.gate_up"],
            w["mlp.gate_up_bias"],
            w["mlp.down"],
            context.on_one_shard(w["mlp.down_bias"]),
            norm=norm,
            activation=self.activation,
            method=context.options.moe,
            num_tokens=context.num_tokens,
            implementation=context.options.kernels,
        )
        return x + context.all_reduce(h.reshape(x.shape), mesh.EXPERT)


@dataclass(frozen=True)
class Layer:
    """Attention, then a feed-forward network. Equal layers are one kind: traced once, stacked
    together, with one line per weight."""

    attention: Attention
    mlp: Mlp | Moe

    @cached_property
    def table(self) -> Table:
        return self.attention.table() | self.mlp.table()

    def __call__(self, w: LayerWeights, x: Hidden, *, attend: Attend, context: Context) -> Hidden:
        x = self.attention(w, x, attend, context)
        return self.mlp(w, x, context)
