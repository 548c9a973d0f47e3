"""The parts of a decoder layer that stand in attention's place and keep a state per sequence.

As in `nn.parts`, a part owns its lines of the weight table, the sizes of its axes and its forward
pass; beside those the shapes of what it keeps: float32 arrays whose first axis a mesh splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from jaxtyping import Array, Float

from rooflax.nn.layers import LayerWeights, Recall
from rooflax.nn.layout import STATE
from rooflax.nn.parts import PRE, Context, Hidden, NormKind, Table, Wiring
from rooflax.nn.weights import Channels, Flat, FusedRows, Linear, Weight
from rooflax.ops.linear import Norm
from rooflax.ops.recurrent import Runs, causal_conv
from rooflax.ops.weights import taken

SHORT_CONV = "model.layers.{i}.conv"


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

    def table(self) -> Table:
        lines = self.wiring.table(self.norm, "conv", "input_layernorm", "post_attention_layernorm")
        first, last = f"{SHORT_CONV}.in_proj", f"{SHORT_CONV}.out_proj"
        lines["conv.in"] = Weight("hidden -> branches channels", f"{first}.weight", FusedRows())
        lines["conv.taps"] = Weight("channels taps", f"{SHORT_CONV}.conv.weight", Channels())
        lines["conv.out"] = Weight("channels -> hidden", f"{last}.weight", Linear(), "residual")
        if self.bias:
            fused = FusedRows(bias=True)
            lines["conv.in_bias"] = Weight("branches channels", f"{first}.bias", fused, "zeros")
            lines["conv.taps_bias"] = Weight("channels", f"{SHORT_CONV}.conv.bias", init="zeros")
            lines["conv.out_bias"] = Weight("hidden", f"{last}.bias", Flat(), "zeros")
        return lines

    def __call__(self, w: LayerWeights, x: Hidden, recall: Recall, context: Context) -> Hidden:
        branch = partial(self._branch, w, x, recall, context)
        return self.wiring(branch, self.norm, "conv", w, x)

    def _branch(
        self,
        w: LayerWeights,
        x: Hidden,
        recall: Recall,
        context: Context,
        norm: Norm | None,
        residual: Hidden | None,
    ) -> Hidden:
        found = context.linear(x, w["conv.in"], w.get("conv.in_bias"), prologue=norm)
        b, c, h = found[..., 0, :], found[..., 1, :], found[..., 2, :]
        inputs, taps = (b * h).reshape(-1, h.shape[-1]), taken(w["conv.taps"])

        def run(runs: Runs, states: tuple[Array, ...]) -> tuple[Float[Array, "T C"], tuple]:
            y, pool = causal_conv(inputs, taps, states[0], runs)
            return y, (pool,)

        y = recall(run, ((h.shape[-1], self.taps - 1),))
        if (bias := w.get("conv.taps_bias")) is not None:
            y = y + taken(bias).astype(y.dtype)[None]
        h = (c * y.reshape(c.shape)).astype(x.dtype)
        out_bias, residual = (
            context.on_one_shard(w.get("conv.out_bias")),
            context.on_one_shard(residual),
        )
        return context.all_reduce(context.linear(h, w["conv.out"], out_bias, residual=residual))
