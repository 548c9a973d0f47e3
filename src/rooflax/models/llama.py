"""LLaMA 2, 3, 3.1, 3.2: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The architecture and nothing else: no files, dtypes, kernels or sampling. Refused: partial
rotary dimensions, activations other than those of ops.activation.

Source: transformers, models/llama/modeling_llama.py; Touvron et al., LLaMA 2, 2023; Grattafiori et
al., The Llama 3 Herd of Models, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.errors import CheckpointError
from rooflax.models.config_reader import ConfigReader
from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache, LayerGroups
from rooflax.nn.layers import Attend, LayerWeights, run_layers
from rooflax.nn.rope import RopeScaling, RopeTable
from rooflax.nn.weights import QKV, Flat, GateUp, Linear, Weight
from rooflax.ops.activation import ACTIVATIONS
from rooflax.ops.linear import Activation, Norm, linear, unembed
from rooflax.ops.rope import apply_rope, rope_rows


@dataclass(frozen=True)
class Config:
    """LLaMA's architecture, in Hugging Face's words (transformers, configuration_llama.py)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()  # () is full attention everywhere

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
            "head_dim": self.head_dim,
        }

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups.from_windows(self.layer_windows or (None,) * self.num_layers)


def read_sizes(reader: ConfigReader, *, max_position: int, norm_eps: float) -> dict[str, Any]:
    """The fields that LLaMA and its descendants read alike, with a family's own defaults."""
    num_heads = reader.size("num_attention_heads")
    hidden_size = reader.size("hidden_size")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json has num_attention_heads = {num_heads} and num_key_value_heads = "
            f"{num_kv_heads}; the first must be a multiple of the second."
        )
    if reader.get("head_dim", None) is None and hidden_size % num_heads:
        raise CheckpointError(
            f"config.json has hidden_size = {hidden_size} and num_attention_heads = {num_heads}; "
            f"the first must be a multiple of the second unless head_dim is given."
        )
    head_dim = reader.size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json has head_dim = {head_dim}; RoPE needs an even one.")
    return {
        "vocab_size": reader.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": reader.size("num_hidden_layers", most=10_000),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": reader.size("max_position_embeddings", max_position),
        "norm_eps": reader.number("rms_norm_eps", norm_eps),
    }


def config_from_hf(reader: ConfigReader) -> Config:
    sizes = read_sizes(reader, max_position=2048, norm_eps=1e-6)
    theta, scaling = reader.rope(sizes["head_dim"], default_theta=10_000.0)
    attention_bias = reader.flag("attention_bias", False)
    return Config(
        **sizes,
        intermediate_size=reader.size("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        activation=reader.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The config.json that transformers reads as this architecture."""
    return base_config_to_hf(config) | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def base_config_to_hf(config: Any) -> dict[str, Any]:
    """The keys that LLaMA and its descendants write alike."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling.to_hf() if config.rope_scaling else None,
    }


def weights(config: Config) -> dict[str, Weight]:
    """The weight table."""
    layer, attn, mlp = "model.layers.{i}", "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
    qkv = tuple(f"{attn}.{p}_proj" for p in "qkv")
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    table = {
        "embed": Weight("vocab hidden", "model.embed_tokens.weight"),
        "final_norm": Weight("hidden", "model.norm.weight", init="ones"),
        "layers.{i}.attn.norm": Weight("hidden", f"{layer}.input_layernorm.weight", init="ones"),
        "layers.{i}.attn.qkv": Weight(
            "hidden -> kv_heads qkv_group head_dim", tuple(f"{n}.weight" for n in qkv), QKV()
        ),
        "layers.{i}.attn.o": Weight(
            "heads head_dim -> hidden", f"{attn}.o_proj.weight", Linear(), init="residual"
        ),
        "layers.{i}.mlp.norm": Weight(
            "hidden", f"{layer}.post_attention_layernorm.weight", init="ones"
        ),
        "layers.{i}.mlp.gate_up": Weight(
            "hidden -> gate_up mlp", tuple(f"{n}.weight" for n in gate_up), GateUp()
        ),
        "layers.{i}.mlp.down": Weight(
            "mlp -> hidden", f"{mlp}.down_proj.weight", Linear(), init="residual"
        ),
    }
    if not config.tied_embeddings:
        table["lm_head"] = Weight("vocab hidden", "lm_head.weight")
    if config.qkv_bias:
        table["layers.{i}.attn.qkv_bias"] = Weight(
            "kv_heads qkv_group head_dim", tuple(f"{n}.bias" for n in qkv), QKV(bias=True), "zeros"
        )
    if config.output_bias:
        table["layers.{i}.attn.o_bias"] = Weight(
            "hidden", f"{attn}.o_proj.bias", Flat(), init="zeros"
        )
    if config.mlp_bias:
        table["layers.{i}.mlp.gate_up_bias"] = Weight(
            "gate_up mlp", tuple(f"{n}.bias" for n in gate_up), GateUp(bias=True), init="zeros"
        )
        table["layers.{i}.mlp.down_bias"] = Weight(
            "hidden", f"{mlp}.down_proj.bias", Flat(), init="zeros"
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

    def layer(w: LayerWeights, x: Float[Array, "B T D"], attend: Attend) -> Float[Array, "B T D"]:
        norm = Norm(w["attn.norm"], eps=config.norm_eps)
        qkv = product(x, w["attn.qkv"], w.get("attn.qkv_bias"), prologue=norm)
        q, k, v = jnp.split(qkv, (qkv.shape[3] - 2, qkv.shape[3] - 1), axis=3)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q = q.reshape(*q.shape[:2], -1, config.head_dim)
        h = attend(q, k[:, :, :, 0], v[:, :, :, 0], scale=config.head_dim**-0.5)
        o_bias, residual = mesh.once(w.get("attn.o_bias"), shards), mesh.once(x, shards)
        x = product(h, w["attn.o"], o_bias, contract=2, residual=residual)
        x = mesh.all_reduce(x, shards)

        norm = Norm(w["mlp.norm"], eps=config.norm_eps)
        h = product(x, w["mlp.gate_up"], w.get("mlp.gate_up_bias"), prologue=norm)
        down_bias, residual = mesh.once(w.get("mlp.down_bias"), shards), mesh.once(x, shards)
        swiglu = Activation(config.activation, gated=True)
        x = product(h, w["mlp.down"], down_bias, prologue=swiglu, residual=residual)
        return mesh.all_reduce(x, shards)

    cos, sin = rope_rows(rope.cos, rope.sin, batch.positions)
    how = {"dtype": dtype, "num_rows": num_tokens, "kernels": kernels}
    x = mesh.embed(weights["embed"], batch.tokens, shards, **how)
    how = {"options": options, "shards": shards, "remat": remat}
    return run_layers(layer, weights, x, batch, cache, groups=config.groups, **how)


def logits(
    config: Any,
    weights: dict[str, Any],
    hidden: Float[Array, "*batch D"],
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
    shards: mesh.Shards | None = None,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "*batch vocab"]:
    """Next-token logits in float32, of what `forward` gives; `config` is a descendant's too."""
    norm = Norm(weights["final_norm"], eps=config.norm_eps)
    head = weights["embed"] if config.tied_embeddings else weights["lm_head"]
    how = {"num_rows": num_rows, "implementation": options.kernels}
    parts = unembed(hidden, head, prologue=norm, **how)
    return mesh.gather_vocab(parts, config.vocab_size, shards)
