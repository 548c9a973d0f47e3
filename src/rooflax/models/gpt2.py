"""GPT-2: LayerNorm, learned positions, fused c_attn, a two-layer MLP, biases everywhere.

Refused: cross attention, attention scaled by layer index, unscaled attention.

Source: transformers, models/gpt2/modeling_gpt2.py; Radford et al., 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from rooflax.errors import CheckpointError
from rooflax.models.config_reader import ConfigReader
from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache, LayerGroups
from rooflax.nn.layers import Attend, LayerWeights, run_layers
from rooflax.nn.weights import Conv1D, Flat, FusedConv1DQKV, Weight
from rooflax.ops.activation import ACTIVATIONS
from rooflax.ops.linear import Activation, Norm, linear, unembed

HF_PREFIXES = ("transformer.", "")
"""Checkpoints name their tensors with this prefix, or without."""


@dataclass(frozen=True)
class Config:
    """GPT-2's architecture (transformers, configuration_gpt2.py)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int  # tokens; also the rows of the position table
    norm_eps: float
    activation: str = "gelu_new"
    tied_embeddings: bool = True

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {
            "vocab": self.vocab_size,
            "position": self.max_position,
            "hidden": self.hidden_size,
            "mlp": self.intermediate_size,
            "heads": self.num_heads,
            "kv_heads": self.num_heads,
            "qkv_group": 3,
            "head_dim": self.head_dim,
        }

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups.from_windows((None,) * self.num_layers)


def config_from_hf(reader: ConfigReader) -> Config:
    hidden_size, num_heads = reader.size("n_embd", 768), reader.size("n_head", 12)
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json has n_embd = {hidden_size} and n_head = {num_heads}; "
            f"the first must be a multiple of the second."
        )
    return Config(
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("n_inner", 4 * hidden_size),
        num_layers=reader.size("n_layer", 12, most=10_000),
        num_heads=num_heads,
        max_position=reader.size("n_positions", 1024),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        activation=reader.choice("activation_function", tuple(ACTIVATIONS), "gelu_new"),
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The config.json that transformers reads as this architecture."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
        "tie_word_embeddings": config.tied_embeddings,
    }


def weights(config: Config) -> dict[str, Weight]:
    """The weight table."""
    h = "transformer.h.{i}"
    table = {
        "embed": Weight("vocab hidden", "transformer.wte.weight"),
        "position": Weight("position hidden", "transformer.wpe.weight"),
        "final_norm": Weight("hidden", "transformer.ln_f.weight", init="ones"),
        "final_norm_bias": Weight("hidden", "transformer.ln_f.bias", init="zeros"),
        "layers.{i}.attn.norm": Weight("hidden", f"{h}.ln_1.weight", init="ones"),
        "layers.{i}.attn.norm_bias": Weight("hidden", f"{h}.ln_1.bias", init="zeros"),
        "layers.{i}.attn.qkv": Weight(
            "hidden -> kv_heads qkv_group head_dim", f"{h}.attn.c_attn.weight", FusedConv1DQKV()
        ),
        "layers.{i}.attn.qkv_bias": Weight(
            "kv_heads qkv_group head_dim", f"{h}.attn.c_attn.bias", FusedConv1DQKV(), "zeros"
        ),
        "layers.{i}.attn.o": Weight(
            "heads head_dim -> hidden", f"{h}.attn.c_proj.weight", Conv1D(), "residual"
        ),
        "layers.{i}.attn.o_bias": Weight("hidden", f"{h}.attn.c_proj.bias", Flat(), "zeros"),
        "layers.{i}.mlp.norm": Weight("hidden", f"{h}.ln_2.weight", init="ones"),
        "layers.{i}.mlp.norm_bias": Weight("hidden", f"{h}.ln_2.bias", init="zeros"),
        "layers.{i}.mlp.up": Weight("hidden -> mlp", f"{h}.mlp.c_fc.weight", Conv1D()),
        "layers.{i}.mlp.up_bias": Weight("mlp", f"{h}.mlp.c_fc.bias", Flat(), "zeros"),
        "layers.{i}.mlp.down": Weight(
            "mlp -> hidden", f"{h}.mlp.c_proj.weight", Conv1D(), "residual"
        ),
        "layers.{i}.mlp.down_bias": Weight("hidden", f"{h}.mlp.c_proj.bias", Flat(), "zeros"),
    }
    if not config.tied_embeddings:
        table["lm_head"] = Weight("vocab hidden", "lm_head.weight")
    return table


def forward(
    config: Config,
    weights: dict[str, Any],
    rope: None,
    batch: Batch,
    cache: KVCache | None,
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
    shards: mesh.Shards | None = None,
    remat: str | None = None,
    dtype: str | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Hidden states before the final norm, and the cache with the new tokens' K and V."""
    kernels, eps = options.kernels, config.norm_eps
    num_tokens = batch.num_tokens
    product = partial(linear, num_rows=num_tokens, implementation=kernels)

    def layer(w: LayerWeights, x: Float[Array, "B T D"], attend: Attend) -> Float[Array, "B T D"]:
        norm = Norm(w["attn.norm"], w["attn.norm_bias"], eps)
        qkv = product(x, w["attn.qkv"], w["attn.qkv_bias"], prologue=norm)
        q, k, v = (qkv[:, :, :, part] for part in range(3))
        h = attend(q, k, v, scale=config.head_dim**-0.5)
        o_bias, residual = mesh.once(w["attn.o_bias"], shards), mesh.once(x, shards)
        x = product(h, w["attn.o"], o_bias, contract=2, residual=residual)
        x = mesh.all_reduce(x, shards)

        norm = Norm(w["mlp.norm"], w["mlp.norm_bias"], eps)
        h = product(x, w["mlp.up"], w["mlp.up_bias"], prologue=norm)
        down_bias, residual = mesh.once(w["mlp.down_bias"], shards), mesh.once(x, shards)
        act = Activation(config.activation)
        x = product(h, w["mlp.down"], down_bias, prologue=act, residual=residual)
        return mesh.all_reduce(x, shards)

    how = {"dtype": dtype, "num_rows": num_tokens, "kernels": kernels}
    x = mesh.embed(weights["embed"], batch.tokens, shards, **how)
    x = x + weights["position"].at[batch.positions].get(mode="clip").astype(x.dtype)
    how = {"options": options, "shards": shards, "remat": remat}
    return run_layers(layer, weights, x, batch, cache, groups=config.groups, **how)


def logits(
    config: Config,
    weights: dict[str, Any],
    hidden: Float[Array, "*batch D"],
    *,
    options: ExecutionOptions = DEFAULT_OPTIONS,
    shards: mesh.Shards | None = None,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "*batch vocab"]:
    """Next-token logits in float32, of what `forward` gives."""
    norm = Norm(weights["final_norm"], weights["final_norm_bias"], config.norm_eps)
    head = weights["embed"] if config.tied_embeddings else weights["lm_head"]
    how = {"num_rows": num_rows, "implementation": options.kernels}
    parts = unembed(hidden, head, prologue=norm, **how)
    return mesh.gather_vocab(parts, config.vocab_size, shards)
