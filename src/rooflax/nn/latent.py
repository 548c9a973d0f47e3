"""Multi-head latent attention: keys and values of all heads come from one short vector per token.

As in `nn.parts`, a part owns its lines of the weight table, the sizes of its axes and its forward
pass. What the KV cache has of a token is that vector, the latent, and one key for RoPE; the
matrices that would make keys and values of it go to the queries and to the outputs instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn.layer_memory import LayerMemory, LayerPools
from rooflax.nn.layers import LayerWeights
from rooflax.nn.parts import ATTENTION
from rooflax.nn.rope import Rope
from rooflax.nn.tensor_layouts import QKV, Flat, HeadPart, Linear, Reordered
from rooflax.nn.weights import WeightLine
from rooflax.nn.wiring import PRE, Context, Hidden, NormKind, WeightTable, Wiring
from rooflax.ops.linear import Norm, linear_by_head
from rooflax.ops.rope import apply_rope

EPS = 1e-6
"""Epsilon of the latents' norms, whatever that of the others is."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA), with its norm and the residual.

        c = RMSNorm(x W_c), r = rope(x W_r): one of each for all heads
        q, p = x W_q by head, or RMSNorm(x W_a) W_q; p = rope(p)
        scores = scale (q . c W_k + p . r), out = probabilities of c W_v, by head

    It is computed as q W_k^T . c and (probabilities of c) W_v, so that keys and values of the heads
    are never made: attention of one K/V head, whose keys are [c, r] and whose values are c.

    Attributes:
        nope_dim, rope_dim: elements of a head's query without RoPE, and with it.
        value_dim: of a head's value.
        rank: of c.
        query_rank: of the queries' latent; None is none.
        mscale: YaRN's share of ln(factor) in the scale of scores; 0 is none.
        interleaved: checkpoints pair the dimensions (2i, 2i + 1) for RoPE.
        bias: of the projections from and to the residual stream, but none of queries without a
            latent.
        num_kv_heads: copies of the one, for as many tensor shards.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    norm: NormKind
    rope: Rope
    query_rank: int | None = None
    mscale: float = 0.0
    interleaved: bool = True
    bias: bool = False
    num_kv_heads: int = 1
    wiring: Wiring = PRE

    key: ClassVar[str] = "attn"
    window: ClassVar[None] = None
    causal: ClassVar[bool] = True
    flat_norm: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Size of the one key."""
        return self.rank + self.rope_dim

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Number of keys, their size, and that values are in the keys."""
        return self.num_kv_heads, self.head_dim, 1

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        scaling = self.rope.scaling
        far = math.log(scaling.factor) if scaling and scaling.factor > 1 else 0.0
        return (self.nope_dim + self.rope_dim) ** -0.5 * (1 + 0.1 * self.mscale * far) ** 2

    def axis(self, name: str) -> str:
        """An axis's name in the table."""
        return name

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        sizes = {
            "query_heads": self.num_heads,
            "query_dim": self.nope_dim + self.rope_dim,
            "nope_dim": self.nope_dim,
            "value_dim": self.value_dim,
            "latent": self.rank,
            "latent_key": self.head_dim,
            "each": 1,
        }
        return sizes | ({"query_latent": self.query_rank} if self.query_rank else {})

    def _order(self, before: int) -> tuple[int, ...] | None:
        """Order of a vector whose RoPE dimensions stand behind others."""
        order = self.rope.order(self.rope_dim, self.interleaved)
        return order and (*range(before), *(before + i for i in order))

    def table(self) -> WeightTable:
        lines = self.wiring.table(self.norm, "attn", "input_layernorm", "post_attention_layernorm")
        queries, name = "hidden", f"{ATTENTION}.q_proj.weight"
        if self.query_rank:
            queries, name = "query_latent", f"{ATTENTION}.q_b_proj.weight"
            first = f"{ATTENTION}.q_a_proj"
            lines["attn.q_a"] = WeightLine("hidden -> query_latent", f"{first}.weight", Linear())
            if self.bias:
                lines["attn.q_a_bias"] = WeightLine("query_latent", f"{first}.bias", init="zeros")
            hf = f"{ATTENTION}.q_a_layernorm.weight"
            lines["attn.q_norm"] = WeightLine("query_latent", hf, init="ones")
        order = self._order(self.nope_dim)
        axes = f"{queries} -> query_heads each query_dim"
        lines["attn.q"] = WeightLine(axes, (name,), QKV(order=order, num_kv=0))
        order, first = self._order(self.rank), f"{ATTENTION}.kv_a_proj_with_mqa"
        layout = QKV(order=order, num_kv=0)
        axes = "each each latent_key"
        lines["attn.kv_a"] = WeightLine(f"hidden -> {axes}", (f"{first}.weight",), layout)
        if self.bias:
            biases = Reordered(order) if order else Flat()
            lines["attn.kv_a_bias"] = WeightLine("latent_key", f"{first}.bias", biases, "zeros")
        hf, both = f"{ATTENTION}.kv_a_layernorm.weight", f"{ATTENTION}.kv_b_proj.weight"
        lines["attn.kv_norm"] = WeightLine("latent", hf, init="ones")
        dims = self.nope_dim, self.value_dim
        axes = "query_heads | nope_dim -> latent", "query_heads | latent -> value_dim"
        lines["attn.k_b"] = WeightLine(axes[0], both, HeadPart(dims, 0))
        lines["attn.v_b"] = WeightLine(axes[1], both, HeadPart(dims, 1))
        output, axes = f"{ATTENTION}.o_proj", "query_heads value_dim -> hidden"
        lines["attn.o"] = WeightLine(axes, f"{output}.weight", Linear(), "residual")
        if self.bias:
            lines["attn.o_bias"] = WeightLine("hidden", f"{output}.bias", init="zeros")
        return lines

    def __call__(
        self, w: LayerWeights, x: Hidden, memory: LayerMemory, context: Context
    ) -> tuple[Hidden, LayerPools | None]:
        norm = self.wiring.prologue(self.norm, "attn", w)
        cos, sin, _ = context.rope[self.rope, self.rope_dim]
        q = self._queries(w, x, norm, context)
        q, p = q[..., : self.nope_dim], apply_rope(q[..., self.nope_dim :], cos, sin)
        key = context.linear(x, w["attn.kv_a"], w.get("attn.kv_a_bias"), prologue=norm)[..., 0, :]
        c = context.norm(key[..., : self.rank], Norm(w["attn.kv_norm"], eps=EPS))
        r = apply_rope(key[..., self.rank :], cos, sin)
        q = jnp.concatenate((self._by_head(q, w["attn.k_b"], context), p), axis=-1)
        key = jnp.concatenate((c, r), axis=-1)
        h, pools = memory.attend(q, key, None, scale=self.scale, values_in_keys=self.rank)
        h = self._by_head(h[..., : self.rank], w["attn.v_b"], context)
        o_bias = context.on_one_shard(w.get("attn.o_bias"))
        residual = context.on_one_shard(self.wiring.residual(x))
        h = context.linear(h, w["attn.o"], o_bias, contract=2, residual=residual)
        return self.wiring.joined(x, context.all_reduce(h), self.norm, "attn", w, context), pools

    def _queries(
        self, w: LayerWeights, x: Hidden, norm: Norm | None, context: Context
    ) -> Float[Array, "B T heads dim"]:
        if self.query_rank:
            x = context.linear(x, w["attn.q_a"], w.get("attn.q_a_bias"), prologue=norm)
            norm = Norm(w["attn.q_norm"], eps=EPS)
        return context.linear(x, w["attn.q"], prologue=norm)[..., 0, :]

    @staticmethod
    def _by_head(x: Array, weight: Any, context: Context) -> Array:
        kernels = context.options.kernels
        return linear_by_head(x, weight, num_rows=context.num_tokens, implementation=kernels)
