"""The parts of a decoder layer: attention, and a feed-forward network, dense or of experts.

A part owns its lines of the weight table, the sizes of its axes and its forward pass. The lines
bear the names of LLaMA's checkpoints; a family with other names maps them (`Decoder.names`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn import mesh
from rooflax.nn.layer_memory import LayerMemory, LayerPools
from rooflax.nn.layers import LayerWeights
from rooflax.nn.per_layer import PerLayer
from rooflax.nn.rope import Rope
from rooflax.nn.tensor_layouts import (
    QKV,
    Flat,
    Float32,
    Linear,
    Parallel,
    PerExpert,
    Reordered,
    Rows,
    StackedExperts,
    Swapped,
    TensorLayout,
)
from rooflax.nn.weights import StoredAs, WeightLine
from rooflax.nn.wiring import (
    PRE,
    Context,
    Hidden,
    NormKind,
    WeightTable,
    Wiring,
)
from rooflax.ops.attention import Projected
from rooflax.ops.linear import Activation, ClampedSwiglu, Norm
from rooflax.ops.moe import experts, route
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
        score_cap: scores are cap * tanh(score / cap); None is no cap.
        norm_after_rope: `qk_norm` is after it.
        interleaved: checkpoints pair a head's dimensions (2i, 2i + 1) for RoPE.
        causal: queries see no token behind their own; otherwise a window reaches both ways.
        gate: the query projection gives a gate of each head's output, too.
        key: its name in the table, and of its axes; a model whose layers differ in heads has
            another for the others.
        v_norm: `qk_norm` is of value heads, too, and has no weight there.
        values_are_keys: there is no projection of values; they are the keys before norm and RoPE.
        reuses_kv: keys and values are those of the nearest layer before it that has its own, a
            window of the same size and heads of the same.
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
    key: str = "attn"
    v_norm: bool = False
    values_are_keys: bool = False
    reuses_kv: bool = False
    score_cap: float | None = None

    @property
    def projected(self) -> str:
        """Projected parts, out of q, k and v."""
        return "q" if self.reuses_kv else "qk" if self.values_are_keys else "qkv"

    @property
    def rope_dim(self) -> int:
        """Size of the part of a head that RoPE rotates."""
        return self.head_dim

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Number of K/V heads, and their size; fields of `nn.kv_cache.Heads`."""
        return self.num_kv_heads, self.head_dim

    def axis(self, name: str) -> str:
        """An axis's name in the table: the part's own where layers differ in heads."""
        return name if self.key == "attn" or name == "hidden" else f"{self.key}.{name}"

    def _axes(self, names: str) -> str:
        return " ".join(n if n == "->" else self.axis(n) for n in names.split())

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        queries = self.num_heads // self.num_kv_heads * (1 + self.gate)
        sizes = {"q_group": queries} if self.flat_norm else {}
        sizes |= {
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            f"{self.projected}_group": queries + len(self.projected) - 1,
            "head_dim": self.head_dim,
        }
        return {self.axis(name): size for name, size in sizes.items()}

    def table(self) -> WeightTable:
        key, projected = self.key, self.projected
        names = tuple(f"{ATTENTION}.{part}_proj" for part in projected)
        weights, biases = (tuple(f"{n}.{end}" for n in names) for end in ("weight", "bias"))
        norms = "input_layernorm", "post_attention_layernorm"
        lines = self.wiring.table(self.norm, key, *norms)
        order = (self.rope or Rope(1.0)).order(self.head_dim, self.interleaved)
        axes = self._axes(f"kv_heads {projected}_group head_dim")
        layout = QKV(order=order, gated=self.gate, num_kv=len(projected) - 1)
        lines[f"{key}.{projected}"] = WeightLine(f"hidden -> {axes}", weights, layout)
        if self.qkv_bias:
            layout = replace(layout, bias=True)
            lines[f"{key}.{projected}_bias"] = WeightLine(axes, biases, layout, "zeros")
        if self.qk_norm is not None:
            for part in self._normed:
                line, hf = f"{key}.{part}_norm", f"{ATTENTION}.{part}_norm"
                lines |= self.norm.table(line, hf, self.axis("head_dim"))
                if order:
                    layout = Reordered(order, lines[line].layout)
                    lines[line] = replace(lines[line], layout=layout)
        if self.flat_norm:
            axes = {"q": "kv_heads q_group head_dim", "k": "kv_heads head_dim"}
            for part in self._normed:
                hf = f"{ATTENTION}.{part}_norm.weight"
                line = WeightLine(self._axes(axes[part]), hf, Flat(), "ones")
                lines[f"{key}.{part}_norm"] = line
        if self.sinks:
            lines[f"{key}.sinks"] = WeightLine(self.axis("heads"), f"{ATTENTION}.sinks")
        output = f"{ATTENTION}.o_proj"
        axes = self._axes("heads head_dim -> hidden")
        lines[f"{key}.o"] = WeightLine(axes, f"{output}.weight", Linear(), "residual")
        if self.output_bias:
            lines[f"{key}.o_bias"] = WeightLine("hidden", f"{output}.bias", Flat(), "zeros")
        return lines

    @property
    def _normed(self) -> str:
        """Parts with norm weights."""
        return "q" if self.reuses_kv else "qk"

    def __call__(
        self, w: LayerWeights, x: Hidden, memory: LayerMemory, context: Context
    ) -> tuple[Hidden, LayerPools | None]:
        key, num_kv = self.key, len(self.projected) - 1
        line, norm = f"{key}.{self.projected}", self.wiring.prologue(self.norm, key, w)
        qkv = context.linear(x, w[line], w.get(f"{line}_bias"), prologue=norm)
        new = self._projection(w, qkv, context)
        last = qkv.shape[3]
        q, *kv = jnp.split(qkv, tuple(range(last - num_kv, last)), axis=3)
        q, gate = (q[:, :, :, ::2], q[:, :, :, 1::2]) if self.gate else (q, None)
        k, v = (kv[0], kv[-1]) if kv else (None, None)
        after = self.norm_after_rope and not self.flat_norm
        q, factor = self._turned(q, "q", after, w, context)
        if factor is not None:
            q = (q.astype(jnp.float32) * factor[..., None, None]).astype(q.dtype)
        q = q.reshape(*q.shape[:2], -1, self.head_dim)
        if k is not None and v is not None:
            k, _ = self._turned(k, "k", after, w, context)
            if self.v_norm:
                v = context.norm(v, Norm(jnp.ones(self.head_dim), eps=self.qk_norm or 0.0))
            k, v = k[:, :, :, 0], v[:, :, :, 0]
        scale, sinks = self.scale or self.head_dim**-0.5, w.get(f"{key}.sinks")
        h, pools = memory.attend(
            q,
            k,
            v,
            scale=scale,
            sinks=sinks,
            causal=self.causal,
            bias=context.bias,
            new=new,
            cap=self.score_cap,
        )
        if gate is not None:
            h = h * jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(h.shape).astype(h.dtype)
        o_bias = context.on_one_shard(w.get(f"{key}.o_bias"))
        residual = context.on_one_shard(self.wiring.residual(x))
        h = context.linear(h, w[f"{key}.o"], o_bias, contract=2, residual=residual)
        return self.wiring.joined(x, context.all_reduce(h), self.norm, key, w, context), pools

    def _projection(self, w: LayerWeights, qkv: Array, context: Context) -> Projected | None:
        """Projection for the fused attention step; None if a step in between is not covered."""
        if self.projected != "qkv" or self.gate or self.v_norm:
            return None
        if self.flat_norm or self.norm_after_rope:
            return None
        cos = sin = norms = None
        if self.rope is not None:
            cos, sin, factor = context.rope[self.rope, self.head_dim]
            if factor is not None:
                return None
        if self.qk_norm is not None:
            norms = taken(w[f"{self.key}.q_norm"]), taken(w[f"{self.key}.k_norm"])
        return Projected(qkv, cos, sin, norms, self.qk_norm or 0.0)

    def _turned(
        self, heads: Array, part: str, after: bool, w: LayerWeights, context: Context
    ) -> tuple[Array, Array | None]:
        """Queries or keys with norm and RoPE, and the factor of queries at their positions."""
        factor = None
        if self.qk_norm is not None and not after:
            heads = self._norm(heads, part, w, context)
        if self.rope is not None:
            cos, sin, factor = context.rope[self.rope, self.head_dim]
            heads = apply_rope(heads, cos, sin)
        if self.qk_norm is not None and after:
            heads = self._norm(heads, part, w, context)
        return heads, factor

    def _norm(self, heads: Array, part: str, w: LayerWeights, context: Context) -> Array:
        """RMSNorm of every head, or of all together."""
        weight, count = w[f"{self.key}.{part}_norm"], self.num_heads
        if self.flat_norm:
            return self._flat(heads, weight, count if part == "q" else self.num_kv_heads, context)
        return context.norm(heads, Norm(weight, eps=self.qk_norm or 0.0))

    def _flat(self, x: Array, weight: Any, heads: int, context: Context) -> Array:
        """RMSNorm over all heads; those of all tensor shards count."""
        assert self.qk_norm is not None
        flat, weight = x.reshape(*x.shape[:2], -1), taken(weight).reshape(-1)
        if context.shards is None or not context.shards.among(mesh.TENSOR):
            return context.norm(flat, Norm(weight, eps=self.qk_norm)).reshape(x.shape)
        flat = flat.astype(jnp.float32)
        squares = context.all_reduce(jnp.sum(jnp.square(flat), axis=-1, keepdims=True))
        scale = jax.lax.rsqrt(squares / (heads * self.head_dim) + self.qk_norm)
        flat = flat * scale * weight.astype(jnp.float32)
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

    def table(self) -> WeightTable:
        key = self.key
        lines = _mlp_norms(self.wiring, self.norm, key)
        parts = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        weights, biases = (tuple(f"{MLP}.{p}.{end}" for p in parts) for end in ("weight", "bias"))
        out, layout = (f"gate_up {key}", Parallel()) if self.gated else (key, Linear())
        flat = Parallel() if self.gated else Flat()
        lines[self._first] = WeightLine(f"hidden -> {out}", weights, layout)
        if self.bias:
            lines[f"{self._first}_bias"] = WeightLine(out, biases, flat, "zeros")
        down, axes = f"{MLP}.down_proj", f"{key} -> hidden"
        lines[f"{key}.down"] = WeightLine(axes, f"{down}.weight", Linear(), "residual")
        if self.bias:
            lines[f"{key}.down_bias"] = WeightLine("hidden", f"{down}.bias", Flat(), "zeros")
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
        norm = self.wiring.prologue(self.norm, self.key, w) or prologue
        onto = x if onto is None else onto
        h = self.branch(w, x, context, norm, self.wiring.residual(onto))
        return self.wiring.joined(onto, h, self.norm, self.key, w, context)

    def branch(
        self,
        w: LayerWeights,
        x: Hidden,
        context: Context,
        norm: Norm | None,
        residual: Hidden | None,
    ) -> Hidden:
        """The network of x, normed, and what is added to it."""
        key, first = self.key, self._first
        h = context.linear(x, w[first], w.get(f"{first}_bias"), prologue=norm)
        bias = context.on_one_shard(w.get(f"{key}.down_bias"))
        residual = context.on_one_shard(residual)
        activation = Activation(self.activation, gated=self.gated)
        down = w[f"{key}.down"]
        return context.all_reduce(
            context.linear(h, down, bias, prologue=activation, residual=residual)
        )


def _mlp_norms(wiring: Wiring, norm: NormKind, key: str) -> WeightTable:
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
        shared: width of the shared expert(s); 0 is none.
        shared_gated: its result is multiplied by a gate of one number.
        biased: shares are sigmoids; a bias of each expert has a say in which are chosen.
        scale: of the shares.
        groups: of as many experts each; a token's experts are of the best `chosen_groups` of them,
            by their largest share, or, where shares are sigmoids, by the sum of two.
        stacked: one tensor of a checkpoint holds all experts; those of others are read, too.
        beside: a dense network for all tokens, with a norm before it of its own. Then its result
            and that of the experts have a norm each, and the sum is wired as `beside` is.
        router_norm: the router reads what a norm of its own gives, times hidden^-1/2.
        expert_scales: every expert's share is multiplied by a number of its own.
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
    groups: int = 1
    chosen_groups: int = 1
    stacked: bool = False
    beside: Mlp | None = None
    router_norm: bool = False
    expert_scales: bool = False

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        count = self.num_experts
        shared = {"shared_mlp": self.shared, "gates": 1} if self.shared else {}
        shared |= self.beside.axis_sizes if self.beside else {}
        return shared | {"mlp": self.width, "gate_up": 2, "experts": count, "routes": count}

    def table(self) -> WeightTable:
        lines = self.norm.table("mlp.norm", "model.layers.{i}.post_attention_layernorm")
        lines["mlp.router"] = WeightLine("hidden -> routes", f"{MLP}.gate.weight", Linear())
        each, axes = self.stored("gate_proj", "up_proj"), "experts | hidden -> gate_up mlp"
        places = (
            StoredAs(each, PerExpert(Parallel())),
            StoredAs(f"{MLP}.experts.gate_up_proj", StackedExperts(Rows(Parallel()))),
        )
        lines["mlp.gate_up"] = self._line(axes, places)
        places = (
            StoredAs(self.stored("down_proj"), PerExpert(Linear())),
            StoredAs(f"{MLP}.experts.down_proj", StackedExperts(Linear())),
        )
        lines["mlp.down"] = self._line("experts | mlp -> hidden", places, "residual")
        if self.shared:
            both = tuple(f"{MLP}.shared_expert.{part}_proj.weight" for part in ("gate", "up"))
            down = f"{MLP}.shared_expert.down_proj.weight"
            gate = f"{MLP}.shared_expert_gate.weight"
            lines["mlp.shared_gate_up"] = WeightLine(
                "hidden -> gate_up shared_mlp", both, Parallel()
            )
            axes = "shared_mlp -> hidden"
            lines["mlp.shared_down"] = WeightLine(axes, down, Linear(), "residual")
            if self.shared_gated:
                lines["mlp.shared_gate"] = WeightLine("gates hidden", gate)
        if self.router_norm:
            lines |= self.norm.table("mlp.router_norm", f"{MLP}.gate_norm")
        if self.expert_scales:
            stored = f"{MLP}.gate.per_expert_scale"
            lines["mlp.expert_scales"] = WeightLine("routes", stored, Float32(), "ones")
        if self.beside:
            lines |= self.beside.table()
            for number, key in ((1, self.beside.key), (2, "mlp")):
                hf = f"model.layers.{{i}}.post_feedforward_layernorm_{number}"
                lines |= self.norm.table(f"{key}.own_norm", hf)
        if self.biased:
            stored = f"{MLP}.gate.e_score_correction_bias"
            lines["mlp.choice_bias"] = WeightLine("routes", stored, Float32(), "zeros")
        if self.bias:
            fused, split = f"{MLP}.experts.gate_up_proj_bias", Swapped(2)
            lines["mlp.router_bias"] = WeightLine("routes", f"{MLP}.router.bias", init="zeros")
            lines["mlp.gate_up_bias"] = WeightLine("experts gate_up mlp", fused, split, "zeros")
            stored = f"{MLP}.experts.down_proj_bias"
            lines["mlp.down_bias"] = WeightLine("experts hidden", stored, init="zeros")
        return lines

    def _line(
        self, axes: str, places: tuple[StoredAs, StoredAs], init: str = "normal"
    ) -> WeightLine:
        """Table line of experts, which are stored one by one or in one tensor."""
        first, other = reversed(places) if self.stacked else places
        return WeightLine(axes, first.hf, first.layout or TensorLayout(), init, other)

    def stored(self, *parts: str, prefix: str = f"{MLP}.experts") -> tuple[str, ...]:
        """The tensors of a checkpoint that has some for each expert."""
        experts = range(self.num_experts)
        return tuple(f"{prefix}.{expert}.{part}.weight" for expert in experts for part in parts)

    def __call__(self, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        if dense := self.beside:
            h = self._both(dense, w, x, context)
            return dense.wiring.joined(x, h, dense.norm, dense.key, w, context)
        h = self._experts(w, x, context, onto=x)
        return h + self._shared(w, x, context) if self.shared else h

    def _both(self, dense: Mlp, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        """The dense network and the experts, each with a norm of its result."""
        norm, residual = dense.wiring.prologue(dense.norm, dense.key, w), dense.wiring.residual(x)
        norms = {key: self.norm.of(w, f"{key}.own_norm") for key in ("mlp", dense.key)}
        h = context.norm(dense.branch(w, x, context, norm, None), norms[dense.key])
        h = h + context.norm(self._experts(w, x, context), norms["mlp"])
        return h if residual is None else residual + h

    def _experts(
        self, w: LayerWeights, x: Hidden, context: Context, onto: Hidden | None = None
    ) -> Hidden:
        """Output of the selected experts, added to `onto`."""
        norm, rows = self.norm.of(w, "mlp.norm"), x.reshape(-1, x.shape[-1])
        reads = self.norm.of(w, "mlp.router_norm") if self.router_norm else norm
        router = context.linear(rows, w["mlp.router"], w.get("mlp.router_bias"), prologue=reads)
        router = router * x.shape[-1] ** -0.5 if self.router_norm else router
        bias = taken(w["mlp.choice_bias"]) if self.biased else None
        options = {"renormalise": self.renormalise, "bias": bias, "scale": self.scale}
        options |= {"groups": (self.groups, self.chosen_groups)}
        options |= {"implementation": context.options.kernels}
        expert_ids, routing_weights = route(router, self.experts_per_token, **options)
        if self.expert_scales:
            routing_weights = routing_weights * taken(w["mlp.expert_scales"])[expert_ids]
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
            residual=None if onto is None or context.shards else onto.reshape(rows.shape),
            num_tokens=context.num_tokens,
            implementation=context.options.kernels,
        )
        h = h.reshape(x.shape)
        if context.shards is None:
            return h
        h = context.all_reduce(h, mesh.EXPERT)
        return h if onto is None else onto + h

    def _shared(self, w: LayerWeights, x: Hidden, context: Context) -> Hidden:
        """The output of the shared expert(s)."""
        assert isinstance(self.activation, str)
        norm = self.norm.of(w, "mlp.norm")
        activation = Activation(self.activation, gated=True)
        h = context.linear(x, w["mlp.shared_gate_up"], prologue=norm)
        h = context.all_reduce(context.linear(h, w["mlp.shared_down"], prologue=activation))
        if not self.shared_gated:
            return h
        gate = context.linear(x, taken(w["mlp.shared_gate"]).reshape(-1, 1), prologue=norm)
        gate = gate.astype(jnp.float32)
        return (jax.nn.sigmoid(gate) * h.astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class Layer:
    """Attention, then a feed-forward network. Equal layers are one kind: traced once, stacked
    together, with one line per weight.

    Attributes:
        attention: or what stands in its place; see nn.recurrent.
        parallel: the network reads what attention reads, by a norm of its own or by attention's.
        per_layer: adds what an embedding for each layer says of a token.
        scaled: the result is multiplied by a number.
    """

    attention: Attention | Any
    mlp: Mlp | Moe
    parallel: bool = False
    per_layer: PerLayer | None = None
    scaled: bool = False

    @cached_property
    def table(self) -> WeightTable:
        lines = self.attention.table() | self.mlp.table()
        lines |= self.per_layer.layer_table() if self.per_layer else {}
        if self.scaled:
            name = "model.layers.{i}.layer_scalar"
            lines["scale"] = WeightLine("one", name, Float32(), "ones")
        return lines

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        sizes = self.attention.axis_sizes | self.mlp.axis_sizes
        sizes |= self.per_layer.axis_sizes if self.per_layer else {}
        return sizes | ({"one": 1} if self.scaled else {})

    def __call__(
        self,
        w: LayerWeights,
        x: Hidden,
        memory: LayerMemory,
        *,
        context: Context,
        per_layer_input: Float[Array, "B T width"] | None = None,
    ) -> tuple[Hidden, LayerPools | None]:
        """The layer's output and its pools with the new tokens' K and V, or states."""
        y, pools = self.attention(w, x, memory, context)
        if self.parallel:
            assert isinstance(self.mlp, Mlp)
            norm = self.attention.norm.of(w, f"{self.attention.key}.norm")
            y = self.mlp(w, x, context, onto=y, prologue=norm)
        else:
            y = self.mlp(w, y, context)
        if self.per_layer:
            assert per_layer_input is not None
            y = self.per_layer.added(w, y, per_layer_input, context)
        if self.scaled:
            y = (y.astype(jnp.float32) * taken(w["scale"])[0]).astype(y.dtype)
        return y, pools
