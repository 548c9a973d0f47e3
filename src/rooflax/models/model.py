"""`Model`: an architecture, its weights and its RoPE tables, as one pytree.

The arrays are leaves, the rest is static, so a Model can be an argument of a jitted function and
another checkpoint of the same shape compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.errors import RequestError
from rooflax.fields.kinds import is_whole
from rooflax.nn import mesh as mesh_lib
from rooflax.nn.batch import Batch
from rooflax.nn.decoder import Decoder
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache
from rooflax.nn.layers import stack_layers
from rooflax.nn.placement import Placer, put
from rooflax.nn.rope import RopeTable, query_scale, rope_arrays
from rooflax.nn.weights import WeightLine
from rooflax.nn.wiring import Context
from rooflax.ops.accelerator import block_size
from rooflax.ops.activation import capped
from rooflax.ops.linear import unembed
from rooflax.ops.linear.adapter_slots import with_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A model ready to run.

    Attributes:
        weights: the pytree that the config's table describes.
        rope: cos and sin up to `max_model_len`, of each of the config's `ropes`.
        family: model_type in Hugging Face's words.
        config: the architecture.
        max_model_len: longest context in tokens.
        dtype: of the activations; None is the embedding's.
    """

    weights: dict[str, Any]
    rope: tuple[RopeTable, ...]
    family: str = field(metadata={"static": True})
    config: Decoder = field(metadata={"static": True})
    max_model_len: int = field(metadata={"static": True})
    dtype: str | None = field(default=None, metadata={"static": True})

    @property
    def table(self) -> dict[str, WeightLine]:
        return self.config.table

    @property
    def num_parameters(self) -> int:
        return self.config.num_parameters

    @property
    def weights_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.weights))

    def forward(
        self,
        batch: Batch,
        cache: KVCache | None = None,
        *,
        options: ExecutionOptions = DEFAULT_OPTIONS,
        shards: mesh_lib.Shards | None = None,
        remat: str | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Hidden states of the tokens, before the final norm; the cache with their K and V."""
        if cache is None and batch.query_starts is not None:
            batch = batch.in_blocks(len(self.config.groups.windows), block_size())
        local = mesh_lib.local_tokens(batch, shards)
        weights = self.weights
        if batch.adapters is not None and batch.query_starts is not None:
            weights = with_rows(weights, batch.adapters[batch.owners[0]])
        hidden, cache = self.config.forward(
            weights,
            self.rope,
            local,
            cache,
            options=options,
            shards=shards,
            remat=remat,
            dtype=self.dtype,
        )
        return mesh_lib.gather_tokens(hidden, local), cache

    def final_hidden(
        self, hidden: Float[Array, "*batch D"], options: ExecutionOptions = DEFAULT_OPTIONS
    ) -> Float[Array, "*batch D"]:
        """Input of the head, in float32, from hidden states as `forward` gives them."""
        hidden = hidden.astype(jnp.float32)
        if not self.config.final_norm:
            return hidden
        norm = self.config.norm.of(self.weights, "final_norm")
        return Context(options, None, None, {}).norm(hidden, norm)

    def logits(
        self,
        hidden: Float[Array, "*batch D"],
        *,
        options: ExecutionOptions = DEFAULT_OPTIONS,
        shards: mesh_lib.Shards | None = None,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "*batch vocab"]:
        """Next-token logits in float32, of hidden states as `forward` gives them.

        Args:
            num_rows: how many leading rows are real; None is all.
        """
        config, weights = self.config, self.weights
        head = weights["embed"] if config.tied_embeddings else weights["lm_head"]
        keywords = {"num_rows": num_rows, "implementation": options.kernels}
        parts = unembed(hidden, head, prologue=config.norm.of(weights, "final_norm"), **keywords)
        parts = parts if config.logit_scale == 1.0 else parts * config.logit_scale
        parts = parts if config.logit_cap is None else capped(parts, config.logit_cap)
        return mesh_lib.gather_vocab(parts, config.vocab_size, shards)

    def stacked(self) -> Model:
        """The same model with stacked layers, for `layers="scan"`."""
        stack = jax.jit(stack_layers, static_argnames="period")
        return replace(self, weights=stack(self.weights, period=self.config.groups.period))

    def placed(self, place: Placer, mesh: Mesh, *, scan: bool) -> Model:
        """The same model as the steps of a mesh take it."""
        weights = place.finish(self.weights, self.table, scan=scan)
        rope = jax.tree.map(lambda array: put(array, mesh, PartitionSpec()), self.rope)
        return replace(self, weights=weights, rope=rope, config=place.config)


def make_rope(config: Decoder, max_model_len: int) -> tuple[RopeTable, ...]:
    """The tables of a config's RoPEs, on the default device."""
    tables = (
        (*rope_arrays(dim, max_model_len, r.theta, r.scaling, r.dim), query_scale(r, max_model_len))
        for r, dim in zip(config.ropes, config.rope_dims, strict=True)
    )
    return tuple(RopeTable(*jax.device_put(table)) for table in tables)


def resolve_max_model_len(config: Decoder, max_model_len: Any) -> int:
    """The context length to serve: what is asked for, at most what the model was made for."""
    if max_model_len is None:
        return config.max_position
    if not is_whole(max_model_len, int) or not 1 <= max_model_len <= config.max_position:
        raise RequestError(
            f"max_model_len is {max_model_len!r}; this model takes 1 to {config.max_position} "
            f"tokens."
        )
    return max_model_len


def build(
    name: str,
    config: Decoder,
    weights: dict[str, Any],
    max_model_len: int | None,
    dtype: str | None = None,
) -> Model:
    """A Model from parts already on the device."""
    length = resolve_max_model_len(config, max_model_len)
    return Model(weights, make_rope(config, length), name, config, length, dtype)
