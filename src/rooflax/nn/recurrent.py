"""The parts of a decoder layer that stand in attention's place and keep a state per sequence.

As in `nn.parts`, a part owns its lines of the weight table, the sizes of its axes and its forward
pass; beside those the shapes of what it keeps: float32 arrays whose first axis a mesh splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn.layer_memory import LayerMemory, LayerPools
from rooflax.nn.layers import LayerWeights
from rooflax.nn.layout import STATE
from rooflax.nn.parts import PRE, Context, Hidden, NormKind, WeightTable, Wiring
from rooflax.nn.tensor_layouts import Channels, Flat, Float32, HeadRows, Linear, Parallel, Rows
from rooflax.nn.weights import WeightLine
from rooflax.ops.linear import Norm
from rooflax.ops.recurrent import DeltaInputs, Runs, causal_conv, delta_rule
from rooflax.ops.weights import taken

SHORT_CONV, DELTA = "model.layers.{i}.conv", "model.layers.{i}.linear_attn"


@dataclass(frozen=True)
class ShortConv:
    """c * conv(b * x), where b, c and x are projections, with its norm and the residual.

    A sequence's state is the last taps - 1 of b * x.

    Attributes:
        width: channels.
        taps: inputs that each output sees.
        bias: of the projections and the convolution.
    """

    width: int
    taps: int
    norm: NormKind
    bias: bool = False
    wiring: Wiring = PRE

    window: ClassVar[int] = STATE
    rope: ClassVar[None] = None

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return {"channels": self.width, "branches": 3, "taps": self.taps}

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.width, self.taps - 1),)

    def table(self) -> WeightTable:
        lines = self.wiring.table(self.norm, "conv", "input_layernorm", "post_attention_layernorm")
        first, last = f"{SHORT_CONV}.in_proj", f"{SHORT_CONV}.out_proj"
        axes, fused = "branches channels", Rows(Parallel())
        lines["conv.in"] = WeightLine(f"hidden -> {axes}", f"{first}.weight", fused)
        lines["conv.taps"] = WeightLine("channels taps", f"{SHORT_CONV}.conv.weight", Channels())
        lines["conv.out"] = WeightLine("channels -> hidden", f"{last}.weight", Linear(), "residual")
        if self.bias:
            lines["conv.in_bias"] = WeightLine(axes, f"{first}.bias", fused, "zeros")
            taps = f"{SHORT_CONV}.conv.bias"
            lines["conv.taps_bias"] = WeightLine("channels", taps, init="zeros")
            lines["conv.out_bias"] = WeightLine("hidden", f"{last}.bias", Flat(), "zeros")
        return lines

    def __call__(
        self, w: LayerWeights, x: Hidden, memory: LayerMemory, context: Context
    ) -> tuple[Hidden, LayerPools | None]:
        norm = self.wiring.prologue(self.norm, "conv", w)
        projections = context.linear(x, w["conv.in"], w.get("conv.in_bias"), prologue=norm)
        b, c, h = projections[..., 0, :], projections[..., 1, :], projections[..., 2, :]
        inputs, taps = (b * h).reshape(-1, h.shape[-1]), taken(w["conv.taps"])

        def run(runs: Runs, states: tuple[Array, ...]) -> tuple[Float[Array, "T C"], tuple]:
            kernels = context.options.kernels
            y, pool = causal_conv(inputs, taps, states[0], runs, implementation=kernels)
            return y, (pool,)

        y, pools = memory.recall(run, ((h.shape[-1], self.taps - 1),))
        if (bias := w.get("conv.taps_bias")) is not None:
            y = y + taken(bias).astype(y.dtype)[None]
        h = (c * y.reshape(c.shape)).astype(x.dtype)
        out_bias = context.on_one_shard(w.get("conv.out_bias"))
        residual = context.on_one_shard(self.wiring.residual(x))
        h = context.all_reduce(context.linear(h, w["conv.out"], out_bias, residual=residual))
        return self.wiring.joined(x, h, self.norm, "conv", w, context), pools


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule over a short convolution, with its norms and the residual.

        q, k, v = silu(conv(projection)), z, b, a = projections
        o = delta_rule(q, k, v, g, beta)
        g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b)
        out = projection of RMSNorm(o) silu(z)

    A sequence's state is the last taps - 1 inputs of the convolution, and a matrix per value head.

    Attributes:
        num_heads: of keys; each serves `group` value heads.
        taps: inputs that each output of the convolution sees.
        fused: checkpoints have q, k, v and z in one tensor, and b and a, head by head.
    """

    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    taps: int
    norm: NormKind
    fused: bool = False
    wiring: Wiring = PRE

    window: ClassVar[int] = STATE
    rope: ClassVar[None] = None

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of a head's q, k, and v."""
        return self.key_dim, self.key_dim, self.group * self.value_dim

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        values = self.group * self.value_dim
        return {
            "delta_heads": self.num_heads,
            "delta_width": sum(self._widths) + values,
            "delta_inputs": sum(self._widths),
            "delta_gates": 2 * self.group,
            "delta_group": self.group,
            "delta_values": values,
            "value_dim": self.value_dim,
            "taps": self.taps,
        }

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        matrix = (self.num_heads, self.group, self.key_dim, self.value_dim)
        return (self.num_heads, sum(self._widths), self.taps - 1), matrix

    def table(self) -> WeightTable:
        lines = self.wiring.table(self.norm, "delta", "input_layernorm", "post_attention_layernorm")
        widths, group = self._widths, self.group
        first = HeadRows((widths, (widths[2],))), HeadRows(((group,), (group,)))
        names = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
        if self.fused:
            first = HeadRows(((sum(widths) + widths[2],),)), HeadRows(((2 * group,),))
            names = ("in_proj_qkvz",), ("in_proj_ba",)
        stored = [tuple(f"{DELTA}.{name}.weight" for name in each) for each in names]
        lines["delta.in"] = WeightLine("hidden -> delta_heads delta_width", stored[0], first[0])
        lines["delta.gates"] = WeightLine("hidden -> delta_heads delta_gates", stored[1], first[1])
        axes, kernel = "delta_heads delta_inputs taps", HeadRows((widths,), is_kernel=True)
        lines["delta.taps"] = WeightLine(axes, f"{DELTA}.conv1d.weight", kernel)
        for key, name in (("a_log", "A_log"), ("dt_bias", "dt_bias")):
            axes, init = "delta_heads delta_group", "zeros" if key == "a_log" else "ones"
            lines[f"delta.{key}"] = WeightLine(axes, f"{DELTA}.{name}", Float32(), init)
        lines["delta.out_norm"] = WeightLine("value_dim", f"{DELTA}.norm.weight", init="ones")
        axes = "delta_heads delta_values -> hidden"
        lines["delta.out"] = WeightLine(axes, f"{DELTA}.out_proj.weight", Linear(), "residual")
        return lines

    def __call__(
        self, w: LayerWeights, x: Hidden, memory: LayerMemory, context: Context
    ) -> tuple[Hidden, LayerPools | None]:
        norm = self.wiring.prologue(self.norm, "delta", w)
        projections = context.linear(x, w["delta.in"], prologue=norm)
        gates = context.linear(x, w["delta.gates"], prologue=norm)
        heads, inputs = projections.shape[2], sum(self._widths)
        projected = projections[..., :inputs].reshape(-1, heads, inputs)
        gates = gates.reshape(-1, heads, 2, self.group).astype(jnp.float32)

        def run(runs: Runs, states: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
            kernels, taps = context.options.kernels, taken(w["delta.taps"])
            mixed, tails = causal_conv(projected, taps, states[0], runs, implementation=kernels)
            tokens = self._inputs(w, jax.nn.silu(mixed), gates)
            o, matrices = delta_rule(tokens, states[1], runs, implementation=kernels)
            return o, (tails, matrices)

        tail, matrix = self.state_shapes
        o, pools = memory.recall(run, ((heads, *tail[1:]), (heads, *matrix[1:])))
        o = context.norm(o, Norm(w["delta.out_norm"], eps=self.norm.eps))
        z = projections[..., inputs:].reshape(o.shape).astype(jnp.float32)
        h = (o * jax.nn.silu(z)).astype(x.dtype).reshape(*x.shape[:2], heads, -1)
        residual = context.on_one_shard(self.wiring.residual(x))
        h = context.linear(h, w["delta.out"], contract=2, residual=residual)
        h = self.wiring.joined(x, context.all_reduce(h), self.norm, "delta", w, context)
        return h, pools

    def _inputs(
        self, w: LayerWeights, mixed: Float[Array, "T heads width"], gates: Array
    ) -> DeltaInputs:
        q, k, v = jnp.split(mixed, (self.key_dim, 2 * self.key_dim), axis=-1)
        rate = jnp.exp(taken(w["delta.a_log"]).astype(jnp.float32))[None]
        bias = taken(w["delta.dt_bias"]).astype(jnp.float32)[None]
        g = -rate * jax.nn.softplus(gates[:, :, 1] + bias)
        v = v.reshape(*v.shape[:2], self.group, self.value_dim)
        return DeltaInputs(q, k, v, g, jax.nn.sigmoid(gates[:, :, 0]))
