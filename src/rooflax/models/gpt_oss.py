"""GPT-OSS: mixture of experts, attention sinks, alternating windows, YaRN.

Refused: other layer patterns than full and sliding attention, other activations.

Source: transformers, models/gpt_oss/modeling_gpt_oss.py; openai/gpt-oss, gpt_oss/torch/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.errors import CheckpointError
from rooflax.models.config_reader import ConfigReader
from rooflax.models.llama import base_config_to_hf, logits, read_sizes
from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache, LayerGroups
from rooflax.nn.layers import Attend, LayerWeights, run_layers
from rooflax.nn.rope import RopeScaling, RopeTable
from rooflax.nn.weights import QKV, Flat, InterleavedGateUp, Linear, Weight
from rooflax.ops.linear import ClampedSwiglu, Norm, linear
from rooflax.ops.moe import experts, route
from rooflax.ops.rope import apply_rope, rope_rows

__all__ = ["Config", "config_from_hf", "config_to_hf", "forward", "logits", "weights"]

NO_SCALING = {"rope_type": "default"}
"""An absent scaling means DEFAULT_ROPE here, so none at all has to be said."""

DEFAULT_ROPE = RopeScaling("yarn", 32.0, 4096, truncate=False, attention_factor=1.3465735902799727)
"""What transformers assumes where config.json says nothing of RoPE."""


@dataclass(frozen=True)
class Config:
    """GPT-OSS's architecture (transformers, configuration_gpt_oss.py)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    max_position: int  # tokens
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    layer_windows: tuple[int | None, ...]
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    tied_embeddings: bool = False

    @property
    def activation(self) -> str:
        return "silu"

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "mlp": self.intermediate_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "qkv_group": self.num_heads // self.num_kv_heads + 2,
            "gate_up": 2,
            "experts": self.num_experts,
            "routes": self.num_experts,
            "head_dim": self.head_dim,
        }

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups.from_windows(self.layer_windows)


def config_from_hf(reader: ConfigReader) -> Config:
    sizes = read_sizes(reader, max_position=131_072, norm_eps=1e-5)
    num_layers = sizes["num_layers"]
    window = reader.size("sliding_window", 128)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    types = reader.layer_types(num_layers, alternating)
    reader.expect("hidden_act", "silu")
    num_experts = reader.size("num_local_experts", 128)
    experts_per_token = reader.size("num_experts_per_tok", reader.get("experts_per_token", 4))
    if experts_per_token > num_experts:
        raise CheckpointError(
            f"config.json has num_experts_per_tok = {experts_per_token} of num_local_experts = "
            f"{num_experts}; the first must not be larger."
        )
    if reader.get("rope_parameters", None) or reader.get("rope_scaling", None):
        theta, scaling = reader.rope(sizes["head_dim"], default_theta=150_000.0)
    else:
        theta, scaling = reader.number("rope_theta", 150_000.0), DEFAULT_ROPE
    if scaling is not None and scaling.original_max_position:
        # The original length, which RoPE's keys state too.
        reader.expect("initial_context_length", scaling.original_max_position)
    return Config(
        **sizes,
        intermediate_size=reader.size("intermediate_size"),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        rope_theta=theta,
        rope_scaling=scaling,
        layer_windows=tuple(window if t == "sliding_attention" else None for t in types),
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
        attention_bias=reader.flag("attention_bias", True),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The config.json that transformers reads as this architecture."""
    return base_config_to_hf(config) | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": next((w for w in config.layer_windows if w), 128),
        "layer_types": [
            "sliding_attention" if w else "full_attention" for w in config.layer_windows
        ],
        "rope_scaling": config.rope_scaling.to_hf() if config.rope_scaling else NO_SCALING,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "attention_bias": config.attention_bias,
    }


def weights(config: Config) -> dict[str, Weight]:
    """The weight table."""
    layer, attn, mlp = "model.layers.{i}", "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
    qkv = tuple(f"{attn}.{p}_proj" for p in "qkv")
    experts, split = f"{mlp}.experts", InterleavedGateUp()
    table = {
        "embed": Weight("vocab hidden", "model.embed_tokens.weight"),
        "final_norm": Weight("hidden", "model.norm.weight", init="ones"),
        "layers.{i}.attn.norm": Weight("hidden", f"{layer}.input_layernorm.weight", init="ones"),
        "layers.{i}.attn.qkv": Weight(
            "hidden -> kv_heads qkv_group head_dim", tuple(f"{n}.weight" for n in qkv), QKV()
        ),
        "layers.{i}.attn.sinks": Weight("heads", f"{attn}.sinks"),
        "layers.{i}.attn.o": Weight(
            "heads head_dim -> hidden", f"{attn}.o_proj.weight", Linear(), init="residual"
        ),
        "layers.{i}.mlp.norm": Weight(
            "hidden", f"{layer}.post_attention_layernorm.weight", init="ones"
        ),
        "layers.{i}.mlp.router": Weight("hidden -> routes", f"{mlp}.router.weight", Linear()),
        "layers.{i}.mlp.router_bias": Weight("routes", f"{mlp}.router.bias", init="zeros"),
        "layers.{i}.mlp.gate_up": Weight(
            "experts | hidden -> gate_up mlp", f"{experts}.gate_up_proj", split
        ),
        "layers.{i}.mlp.gate_up_bias": Weight(
            "experts gate_up mlp", f"{experts}.gate_up_proj_bias", split, init="zeros"
        ),
        "layers.{i}.mlp.down": Weight(
            "experts | mlp -> hidden", f"{experts}.down_proj", init="residual"
        ),
        "layers.{i}.mlp.down_bias": Weight(
            "experts hidden", f"{experts}.down_proj_bias", init="zeros"
        ),
    }
    if not config.tied_embeddings:
        table["lm_head"] = Weight("vocab hidden", "lm_head.weight")
    if config.attention_bias:
        table["layers.{i}.attn.qkv_bias"] = Weight(
            "kv_heads qkv_group head_dim", tuple(f"{n}.bias" for n in qkv), QKV(bias=True), "zeros"
        )
        table["layers.{i}.attn.o_bias"] = Weight(
            "hidden", f"{attn}.o_proj.bias", Flat(), init="zeros"
        )
    return table


def forward(
    config: Config,
    weights: dict[str, Any],
    rope: RopeTable,
    batch: Batch,
    cache: KVCache | None,
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
    shards: mesh.Shards | None = None,
    remat: str | None = None,
    dtype: str | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Hidden states before the final norm, and the cache with the new tokens' K and V."""
    kernels = options.kernels
    num_tokens = batch.num_tokens
    product = partial(linear, num_rows=num_tokens, implementation=kernels)
    activation = ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)

    def mlp(w: LayerWeights, x: Float[Array, "tokens D"]) -> Float[Array, "tokens D"]:
        norm = Norm(w["mlp.norm"], eps=config.norm_eps)
        router = product(x, w["mlp.router"], w["mlp.router_bias"], prologue=norm)
        expert_ids, shares = route(router, config.experts_per_token)
        num_own = w["mlp.gate_up"].shape[0]
        expert_ids, shares = mesh.own_experts(expert_ids, shares, num_own, shards)
        return experts(
            x,
            expert_ids,
            shares,
            w["mlp.gate_up"],
            w["mlp.gate_up_bias"],
            w["mlp.down"],
            mesh.once(w["mlp.down_bias"], shards),
            norm=norm,
            activation=activation,
            method=options.moe,
            num_tokens=num_tokens,
            implementation=kernels,
        )

    def layer(w: LayerWeights, x: Float[Array, "B T D"], attend: Attend) -> Float[Array, "B T D"]:
        norm = Norm(w["attn.norm"], eps=config.norm_eps)
        qkv = product(x, w["attn.qkv"], w.get("attn.qkv_bias"), prologue=norm)
        q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q = q.reshape(*q.shape[:2], -1, config.head_dim)
        h = attend(
            q, k[:, :, :, 0], v[:, :, :, 0], scale=config.head_dim**-0.5, sinks=w["attn.sinks"]
        )
        o_bias, residual = mesh.once(w.get("attn.o_bias"), shards), mesh.once(x, shards)
        x = product(h, w["attn.o"], o_bias, contract=2, residual=residual)
        x = mesh.all_reduce(x, shards)

        h = mlp(w, x.reshape(-1, config.hidden_size)).reshape(x.shape)
        return x + mesh.all_reduce(h, shards, (mesh.TENSOR, mesh.EXPERT))

    cos, sin = rope_rows(rope.cos, rope.sin, batch.positions)
    how = {"dtype": dtype, "num_rows": num_tokens, "kernels": kernels}
    x = mesh.embed(weights["embed"], batch.tokens, shards, **how)
    how = {"options": options, "shards": shards, "remat": remat}
    return run_layers(layer, weights, x, batch, cache, groups=config.groups, **how)
