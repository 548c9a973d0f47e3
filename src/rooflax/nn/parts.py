"""The parts of a decoder layer: attention, and a feed-forward network, dense or of experts.

A part owns its lines of the weight table, the sizes of its axes and its forward pass. The lines
bear the names of LLaMA's checkpoints; a family with other names maps them (`Decoder.names`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rooflax.nn import mesh
from rooflax.nn.layers import Attend, LayerWeights
from rooflax.nn.rope import Rope
from rooflax.nn.weights import (
    QKV,
    Flat,
    Float32,
    GateUp,
    InterleavedGateUp,
    Linear,
    PerExpert,
    Reordered,
    Rows,
    Stacked,
    Weight,
)
from rooflax.nn.wiring import (
    PRE,
    Context,
    Hidden,
    NormKind,
    Table,
    Wiring,
)
from rooflax.ops.attention import Projected
from rooflax.ops.linear import Activation, ClampedSwiglu, Norm
from rooflax.ops.moe import experts, route
from rooflax.ops.norm import rms_norm
from rooflax.ops.rope import apply_rope
from rooflax.ops.weights import taken

ATTENTION, MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, with its norms and the residual.

    Attributes:
        window: how many tokens a query sees, its own included; None is all.
        rope: None leaves positions out.
        sinks: a logit per query head that takes part in the softmax and has no value.
        qk_norm: epsilon of an RMSNorm of every query and key head before RoPE; None is none.
        flat_norm: `qk_norm` is of all query heads together, and of all key heads.
        scale: of the scores; None is head_dim^-1/2.
        norm_after_rope: `qk_norm` is after it.
        interleaved: checkpoints pair a head's dimensions (2i, 2i + 1) for RoPE.
        causal: queries see no token behind their own; otherwise a window reaches both ways.
        gate: the query projection gives a gate of each head's output, too.
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
    scale: float | None = None
    wiring: Wiring = PRE
    flat_norm: bool = False
    interleaved: bool = False
    norm_after_rope: bool = False
    causal: bool = True
    gate: bool = False

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        group = {"q_group": self.num_heads // self.num_kv_heads} if self.flat_norm else {}
        return group | {
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "qkv_group": self.num_heads // self.num_kv_heads * (1 + self.gate) + 2,
            "head_dim": self.head_dim,
        }

    def table(self) -> Table:
        names = tuple(f"{ATTENTION}.{part}_proj" for part in "qkv")
        weights, biases = (tuple(f"{n}.{end}" for n in names) for end in ("weight", "bias"))
        norms = "input_layernorm", "post_attention_layernorm"
        lines = self.wiring.table(self.norm, "attn", *norms)
        order = (self.rope or Rope(1.0)).order(self.head_dim, self.interleaved)
        axes = "kv_heads qkv_group head_dim"
        layout = QKV(order=order, gated=self.gate)
        lines["attn.qkv"] = Weight(f"hidden -> {axes}", weights, layout)
        if self.qkv_bias:
            lines["attn.qkv_bias"] = Weight(axes, biases, replace(layout, bias=True), "zeros")
        if self.qk_norm is not None:
            for part in "qk":
                key, hf = f"attn.{part}_norm", f"{ATTENTION}.{part}_norm"
                lines |= self.norm.table(key, hf, "head_dim")
                if order:
                    layout = Reordered(order, lines[key].layout)
                    lines[key] = replace(lines[key], layout=layout)
        if self.flat_norm:
            for part, axes in (("q", "kv_heads q_group head_dim"), ("k", "kv_heads head_dim")):
                hf = f"{ATTENTION}.{part}_norm.weight"
                lines[f"attn.{part}_norm"] = Weight(axes, hf, Flat(), "ones")
        if self.sinks:
            lines["attn.sinks"] = Weight("heads", f"{ATTENTION}.sinks")
        output = f"{ATTENTION}.o_proj"
        axes = "heads head_dim -> hidden"
        lines["attn.o"] = Weight(axes, f"{output}.weight", Linear(), "residual")
        if self.output_bias:
            lines["attn.o_bias"] = Weight("hidden", f"{output}.bias", Flat(), "zeros")
        return lines

    def __call__(self, w: LayerWeights, x: Hidden, attend: Attend, context: Context) -> Hidden:
        branch = partial(self._branch, w, x, attend, context)
        return self.wiring(branch, self.norm, "attn", w, x)

    def _branch(
        self,
        w: LayerWeights,
        x: Hidden,
        attend: Attend,
        context: Context,
        norm: Norm | None,
        residual: Hidden | None,
    ) -> Hidden:
        qkv = context.linear(x, w["attn.qkv"], w.get("attn.qkv_bias"), prologue=norm)
        new = self._projected(w, qkv, context)
        q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
        q, gate = (q[:, :, :, ::2], q[:, :, :, 1::2]) if self.gate else (q, None)
        if self.qk_norm is not None and self.flat_norm:
            q = self._flat(q, w["attn.q_norm"], self.num_heads, context)
            k = self._flat(k, w["attn.k_norm"], self.num_kv_heads, context)
        elif self.qk_norm is not None and not self.norm_after_rope:
            q, k = self._normed(q, k, w)
        if self.rope is not None:
            cos, sin, factor = context.rope[self.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            if factor is not None:
                q = (q.astype(jnp.float32) * factor[..., None, None]).astype(q.dtype)
        if self.qk_norm is not None and self.norm_after_rope:
            q, k = self._normed(q, k, w)
        q = q.reshape(*q.shape[:2], -1, self.head_dim)
        scale, sinks = self.scale or self.head_dim**-0.5, w.get("attn.sinks")
        how = {"scale": scale, "sinks": sinks, "causal": self.causal, "new": new}
        h = attend(q, k[:, :, :, 0], v[:, :, :, 0], **how)
        if gate is not None:
            h = h * jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(h.shape).astype(h.dtype)
        o_bias, residual = (
            context.on_one_shard(w.get("attn.o_bias")),
            context.on_one_shard(residual),
        )
        h = context.linear(h, w["attn.o"], o_bias, contract=2, residual=residual)
        return context.all_reduce(h)

    def _projected(self, w: LayerWeights, qkv: Array, context: Context) -> Projected | None:
        """What becomes of the projection's result, unless more does than that can say."""
        if self.gate or self.flat_norm or self.norm_after_rope:
            return None
        cos = sin = None
        if self.rope is not None:
            cos, sin, factor = context.rope[self.rope]
            if factor is not None:
                return None
        norms = None
        if self.qk_norm is not None:
            norms = taken(w["attn.q_norm"]), taken(w["attn.k_norm"])
        return Projected(qkv, cos, sin, norms, self.qk_norm or 0.0)

    def _normed(self, q: Array, k: Array, w: LayerWeights) -> tuple[Array, Array]:
        """RMSNorm of every head."""
        weights = (taken(w["attn.q_norm"]), taken(w["attn.k_norm"]))
        eps = self.qk_norm or 0.0
        return rms_norm(q, weights[0], eps=eps), rms_norm(k, weights[1], eps=eps)

    def _flat(self, x: Array, weight: Any, heads: int, context: Context) -> Array:
        """RMSNorm over all heads; those of all tensor shards count."""
        assert self.qk_norm is not None
        flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
        squares = context.all_reduce(jnp.sum(jnp.square(flat), axis=-1, keepdims=True))
        scale = jax.lax.rsqrt(squares / (heads * self.head_dim) + self.qk_norm)
        flat = flat * scale * taken(weight).astype(jnp.float32).reshape(1, 1, -1)
        return flat.reshape(x.shape).astype(x.dtype)


@dataclass(frozen=True)
class Mlp:
    """Two matmuls with an activation between them, with its norms and the residual.

    Attributes:
        activation: a name of ops.activation.
        gated: the first matmul gives a gate and what it multiplies.
        key: its name in the table and of its axis; a model that has experts in other layers has
            another than theirs.
    """

    width: int
    norm: NormKind
    activation: str
    gated: bool = True
    bias: bool = False
    key: str = "mlp"
    wiring: Wiring = PRE

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return {self.key: self.width} | ({"gate_up": 2} if self.gated else {})

    @property
    def _first(self) -> str:
        return f"{self.key}.gate_up" if self.gated else f"{self.key}.up"

    def table(self) -> Table:
        key = self.key
        lines = _mlp_norms(self.wiring, self.norm, key)
        parts = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        weights, biases = (tuple(f"{MLP}.{p}.{end}" for p in parts) for end in ("weight", "bias"))
        out, layout = (f"gate_up {key}", GateUp()) if self.gated else (key, Linear())
        flat = GateUp(bias=True) if self.gated else Flat()
        lines[self._first] = Weight(f"hidden -> {out}", weights, layout)
        if self.bias:
            lines[f"{self._first}_bias"] = Weight(out, biases, flat, "zeros")
        down = f"{MLP}.down_proj"
        lines[f"{key}.down"] = Weight(f"{key} -> hidden", f"{down}.weight", Linear(), "residual")
        if self.bias:
            lines[f"{key}.down_bias"] = Weight("hidden", f"{down}.bias", Flat(), "zeros")
        return lines

    def __call__(
        self,
        w: LayerWeights,
        x: Hidden,
        context: Context,
        onto: Hidden | None = None,
        prologue: Norm | None = None,
    ) -> Hidden:
        """`onto`, or x, and the network of x, which `prologue` norms if nothing else does."""
        branch = partial(self._branch, w, x, context)
        onto = x if onto is None else onto
        return self.wiring(branch, self.norm, self.key, w, onto, prologue)

    def _branch(
        self,
        w: LayerWeights,
        x: Hidden,
        context: Context,
        norm: Norm | None,
        residual: Hidden | None,
    ) -> Hidden:
        key, first = self.key, self._first
        h = context.linear(x, w[first], w.get(f"{first}_bias"), prologue=norm)
        down_bias, residual = (
            context.on_one_shard(w.get(f"{key}.down_bias")),
            context.on_one_shard(residual),
        )
        activation = Activation(self.activation, gated=self.gated)
        how = {"prologue": activation, "residual": residual}
        h = context.linear(h, w[f"{key}.down"], down_bias, **how)
        return context.all_reduce(h)


def _mlp_norms(wiring: Wiring, norm: NormKind, key: str) -> Table:
    """A feed-forward network's norms; one on attention's result leaves that name to it."""
    before = "pre_feedforward_layernorm" if wiring.after else "post_attention_layernorm"
    return wiring.table(norm, key, before, "post_feedforward_layernorm")


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: a router, and `experts_per_token` of `num_experts` networks per token.

    Attributes:
        width: of one expert.
        activation: a name of ops.activation, of the gate; or GPT-OSS's.
        bias: of the router and of every expert's matmuls.
        renormalise: shares are of the chosen experts alone; else of all, and their sum is below 1.
        shared: width of a network that all tokens pass; 0 is none.
        shared_gated: its result is multiplied by a gate of one number.
        biased: shares are sigmoids; a bias of each expert has a say in which are chosen.
        scale: of the shares.
        stacked: one tensor of a checkpoint holds all experts.
    """

    num_experts: int
    experts_per_token: int
    width: int
    norm: NormKind
    activation: str | ClampedSwiglu
    bias: bool = False
    renormalise: bool = True
    shared: int = 0
    shared_gated: bool = True
    biased: bool = False
    scale: float = 1.0
    stacked: bool = False

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        count = self.num_experts
        shared = {"shared_mlp": self.shared, "gates": 1} if self.shared else {}
        return shared | {"mlp": self.width, "gate_up": 2, "experts": count, "routes": count}

    def table(self) -> Table:
        lines = self.norm.table("mlp.norm", "model.layers.{i}.post_attention_layernorm")
        lines["mlp.router"] = Weight("hidden -> routes", f"{MLP}.gate.weight", Linear())
        first, last = self.stored("gate_proj", "up_proj"), self.stored("down_proj")
        layouts = PerExpert(GateUp()), PerExpert(Linear())
        if self.stacked:
            first, last = f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj"
            layouts = Stacked(Rows(GateUp())), Stacked(Linear())
        lines["mlp.gate_up"] = Weight("experts | hidden -> gate_up mlp", first, layouts[0])
        lines["mlp.down"] = Weight("experts | mlp -> hidden", last, layouts[1], "residual")
        if self.shared:
            both = tuple(f"{MLP}.shared_expert.{part}_proj.weight" for part in ("gate", "up"))
            down = f"{MLP}.shared_expert.down_proj.weight"
            gate = f"{MLP}.shared_expert_gate.weight"
            lines["mlp.shared_gate_up"] = Weight("hidden -> gate_up shared_mlp", both, GateUp())
            lines["mlp.shared_down"] = Weight("shared_mlp -> hidden", down, Linear(), "residual")
            if self.shared_gated:
                lines["mlp.shared_gate"] = Weight("gates hidden", gate)
        if self.biased:
            stored = f"{MLP}.gate.e_score_correction_bias"
            lines["mlp.choice_bias"] = Weight("routes", stored, Float32(), "zeros")
        if self.bias:
            fused, split = f"{MLP}.experts.gate_up_proj_bias", InterleavedGateUp()
            lines["mlp.router_bias"] = Weight("routes", f"{MLP}.router.bias", init="zeros")
            lines["mlp.gate_up_bias"] = Weight("experts gate_up mlp", fused, split, "zeros")
            stored = f"{MLP}.experts.down_proj_bias"
            lines["mlp.down_bias"] = Weight("experts hidden", stored, init="zeros")
        return lines

    def stored(self, *parts: str, prefix: str = f"{MLP}.experts") -> tuple[str, ...]:
        """The tensors of a checkpoint that has some for each expert."""
        experts = range(self.num_experts)
        return tuple(f"{prefix}.{expert}.{part}.weight" for expert in experts for part in parts)

    def __call__(self, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        norm, rows = self.norm.of(w, "mlp.norm"), x.reshape(-1, x.shape[-1])
        router = context.linear(rows, w["mlp.router"], w.get("mlp.router_bias"), prologue=norm)
        bias = taken(w["mlp.choice_bias"]) if self.biased else None
        how = {"renormalise": self.renormalise, "bias": bias, "scale": self.scale}
        how |= {"implementation": context.options.kernels}
        expert_ids, routing_weights = route(router, self.experts_per_token, **how)
        gate = self.activation
        gate = Activation(gate, gated=True) if isinstance(gate, str) else gate
        num_local = w["mlp.gate_up"].shape[0]
        expert_ids, routing_weights = mesh.local_experts(
            expert_ids, routing_weights, num_local, context.shards
        )
        h = experts(
            rows,
            expert_ids,
            routing_weights,
            w["mlp.gate_up"],
            w.get("mlp.gate_up_bias"),
            w["mlp.down"],
            context.on_one_shard(w.get("mlp.down_bias")),
            norm=norm,
            activation=gate,
            method=context.options.moe,
            residual=rows if context.shards is None else None,
            num_tokens=context.num_tokens,
            implementation=context.options.kernels,
        )
        h = h.reshape(x.shape)
        h = h if context.shards is None else x + context.all_reduce(h, mesh.EXPERT)
        return h + self._shared(w, x, norm, context) if self.shared else h

    def _shared(self, w: LayerWeights, x: Hidden, norm: Norm, context: Context) -> Hidden:
        """What the network gives that all tokens pass."""
        assert isinstance(self.activation, str)
        activation = Activation(self.activation, gated=True)
        h = context.linear(x, w["mlp.shared_gate_up"], prologue=norm)
        h = context.all_reduce(context.linear(h, w["mlp.shared_down"], prologue=activation))
        if not self.shared_gated:
            return h
        weight = taken(w["mlp.shared_gate"]).astype(jnp.float32).reshape(1, 1, -1)
        gate = jnp.sum(norm(x).astype(jnp.float32) * weight, axis=-1, keepdims=True)
        return (jax.nn.sigmoid(gate) * h.astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class Layer:
    """Attention, then a feed-forward network. Equal layers are one kind: traced once, stacked
    together, with one line per weight.

    Attributes:
        attention: or what stands in its place; see nn.recurrent.
        parallel: the network reads what attention reads, by attention's norm.
    """

    attention: Attention | Any
    mlp: Mlp | Moe
    parallel: bool = False

    @cached_property
    def table(self) -> Table:
        return self.attention.table() | self.mlp.table()

    def __call__(self, w: LayerWeights, x: Hidden, *, attend: Attend, context: Context) -> Hidden:
        y = self.attention(w, x, attend, context)
        if not self.parallel:
            return self.mlp(w, y, context)
        assert isinstance(self.mlp, Mlp)
        return self.mlp(w, x, context, onto=y, prologue=self.attention.norm.of(w, "attn.norm"))
