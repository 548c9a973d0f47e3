"""`Decoder`: a model's architecture as a value, its table of weights, and its forward pass.

A family reads a config.json and gives one of these; nothing else knows how families differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.distances import NUM_BUCKETS, biases
from rooflax.nn.execution import DEFAULT_OPTIONS, ExecutionOptions
from rooflax.nn.kv_cache import KVCache, LayerGroups, shortest_period
from rooflax.nn.layers import run_layers
from rooflax.nn.layout import STATE
from rooflax.nn.parts import Attention, Layer, Moe
from rooflax.nn.per_layer import PerLayer
from rooflax.nn.rope import Rope, RopeTable
from rooflax.nn.tensor_layouts import Rows
from rooflax.nn.weights import LAYER_PREFIX, Param, StoredAs, WeightLine
from rooflax.nn.wiring import Context, NormKind, WeightTable
from rooflax.ops.rope import rope_rows, rows_at

AnyAttention = Attention | Any
"""Attention, or latent attention, of which others ask only what both have."""


@dataclass(frozen=True)
class TensorNames:
    """Names in a family's checkpoints that differ from LLaMA's.

    Attributes:
        stored: pairs of a table's key and its place; one tensor in place of several has their
            rows, unless a layout says otherwise.
        either: keys whose weights lie where LLaMA's do in some of these checkpoints.
        further: layers behind the model's own, which predict further tokens and are skipped.
    """

    stored: tuple[tuple[str, StoredAs], ...] = ()
    either: tuple[str, ...] = ()
    further: int = 0

    def apply(self, table: WeightTable) -> WeightTable:
        places = dict(self.stored)

        def renamed(key: str, line: WeightLine) -> WeightLine:
            place = places[key]
            fused = isinstance(place.hf, str) and len(line.names) > 1
            layout = place.layout or (Rows(line.layout) if fused else line.layout)
            other = StoredAs(line.hf, line.layout) if key in self.either else line.other
            return replace(line, hf=place.hf, layout=layout, other=other)

        return table | {key: renamed(key, table[key]) for key in table if key in places}


@dataclass(frozen=True)
class Decoder:
    """Embedding, layers, a norm and a head.

    Attributes:
        max_position: tokens of the longest context.
        norm: before the head.
        tied_embeddings: the head is the embedding.
        has_head: a checkpoint that only embeds may be without.
        learned_positions: a table of positions is added to the embedding.
        first_position: the table's row of position 0.
        token_types: rows of a table that is added to the embedding, too; 0 is none. A token of type
            t has the id t * vocab_size + its own.
        embed_norm: of the sum of these; None is none.
        distances: a table of what scores gain by how far the key is; see `nn.distances`.
        final_norm: there is one; an encoder whose layers end with a norm has none.
        names: of its checkpoints' tensors.
        embed_scale, logit_scale: what the embedding, and the logits, are multiplied by.
        logit_cap: logits are cap * tanh(logits / cap) in the end; None is no cap.
        ropes, rope_dims: of all layers, with the sizes of the heads that each turns; derived.
    """

    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[Layer, ...]
    norm: NormKind
    tied_embeddings: bool = False
    has_head: bool = True
    learned_positions: bool = False
    first_position: int = 0
    token_types: int = 0
    embed_norm: NormKind | None = None
    distances: bool = False
    final_norm: bool = True
    names: TensorNames = TensorNames()
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    ropes: tuple[Rope, ...] = field(default=(), repr=False)
    rope_dims: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.ropes:  # those of a whole model, also when it is cut
            kinds = dict.fromkeys((kind.rope, kind.rope_dim) for kind in self.attentions)
            pairs = [(rope, dim) for rope, dim in kinds if rope is not None]
            object.__setattr__(self, "ropes", tuple(rope for rope, _ in pairs))
            object.__setattr__(self, "rope_dims", tuple(dim for _, dim in pairs))

    # What others ask of it

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Number of query heads of the first layer with attention, as the next two."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward network, or of one expert."""
        return self.axis_sizes["mlp"]

    @cached_property
    def moe(self) -> Moe | None:
        """The mixture of experts; None for a dense model."""
        mlps = (layer.mlp for layer in self.layers)
        return next((mlp for mlp in mlps if isinstance(mlp, Moe)), None)

    @cached_property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The kinds of it, in order of their first layers."""
        mixers = dict.fromkeys(layer.attention for layer in self.layers)
        return tuple(mixer for mixer in mixers if mixer.window != STATE)

    @cached_property
    def attention(self) -> AnyAttention:
        """Attention of the first layer that has it."""
        return self.attentions[0]

    @property
    def per_layer(self) -> PerLayer | None:
        """Per-layer embeddings, of models that have them."""
        return self.layers[0].per_layer if self.layers else None

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Size of every axis in the table."""
        sizes = {"vocab": self.vocab_size, "hidden": self.hidden_size}
        if self.learned_positions:
            sizes["position"] = self.first_position + self.max_position
        if self.token_types:
            sizes["token_type"] = self.token_types
        if self.distances:
            sizes["distance"] = NUM_BUCKETS
        for layer in dict.fromkeys(self.layers):
            for name, size in layer.axis_sizes.items():
                first = sizes.setdefault(name, size)
                assert first == size, f"layers differ in {name}"
        return sizes

    @cached_property
    def groups(self) -> LayerGroups:
        """Layer groups, which share blocks of the KV cache."""
        mixers = [layer.attention for layer in self.layers]
        return LayerGroups.from_windows(
            tuple(mixer.window for mixer in mixers),
            tuple((0, 0) if mixer.window == STATE else mixer.kv_heads for mixer in mixers),
            period=shortest_period(self.layers),
            states=tuple(getattr(mixer, "state_shapes", ()) for mixer in mixers),
            sources=self._sources,
        )

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        """Per layer the one whose keys and values it attends to."""
        latest: dict[Any, int] = {}
        sources = []
        for index, layer in enumerate(self.layers):
            mixer = layer.attention
            alike = mixer.window, getattr(mixer, "kv_heads", None)
            if not getattr(mixer, "reuses_kv", False):
                latest[alike] = index
            assert alike in latest, f"layer {index} has no layer whose keys and values it reuses"
            sources.append(latest[alike])
        return tuple(sources)

    @property
    def is_causal(self) -> bool:
        """Whether tokens see none behind them; else sequences run whole, and nothing generates."""
        return all(mixer.causal for mixer in self.attentions)

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        """Windows of the groups with a KV cache; empty if sequences run whole."""
        return self.groups.windows if self.is_causal else ()

    @property
    def num_ids(self) -> int:
        """Ids that a token may have, of all token types."""
        return self.vocab_size * max(1, self.token_types)

    def first(self, count: int) -> Decoder:
        """The same model cut off after its first layers."""
        return replace(self, layers=self.layers[:count])

    def only(self, index: int) -> Decoder:
        """The same model with one of its layers."""
        return replace(self, layers=(self.layers[index],))

    def with_kv_copies(self, copies: Mapping[AnyAttention, int]) -> Decoder:
        """The same model with each kind of attention's K/V heads copied, to so many each."""

        def changed(layer: Layer) -> Layer:
            kind = layer.attention
            if copies.get(kind, 1) == 1:
                return layer
            count = kind.num_kv_heads * copies[kind]
            return replace(layer, attention=replace(kind, num_kv_heads=count))

        return replace(self, layers=tuple(map(changed, self.layers)))

    # Weights

    @cached_property
    def table(self) -> WeightTable:
        """One line per weight; "{i}" stands for every layer that has it."""
        table = {"embed": WeightLine("vocab hidden", "model.embed_tokens.weight")}
        if self.learned_positions:
            table["position"] = WeightLine("position hidden", "model.embed_positions.weight")
        if self.token_types:
            line = WeightLine("token_type hidden", "model.embed_token_types.weight")
            table["token_type"] = line
        if self.distances:
            line = WeightLine("distance heads", "model.relative_attention_bias.weight")
            table["distances"] = line
        if self.embed_norm:
            table |= self.embed_norm.table("embed_norm", "model.embed_norm")
        if self.final_norm:
            table |= self.norm.table("final_norm", "model.norm")
        table |= self.per_layer.table() if self.per_layer else {}
        for layer in dict.fromkeys(self.layers):
            for key, line in layer.table.items():
                first = table.setdefault(LAYER_PREFIX + key, line)
                assert first == line, f"layers differ in {key}"
        if not self.tied_embeddings and self.has_head:
            table["lm_head"] = WeightLine("vocab hidden", "lm_head.weight")
        return self.names.apply(table)

    def params(self) -> Iterator[Param]:
        """Every array of the model, the largest single ones (outside the layers) first."""
        for key, line in self.table.items():
            if not key.startswith(LAYER_PREFIX):
                yield Param(key, None, line)
        for index, layer in enumerate(self.layers):
            for key in layer.table:
                yield Param(key, index, self.table[LAYER_PREFIX + key])

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(param.line.shape(self.axis_sizes)) for param in self.params())

    # Forward

    def forward(
        self,
        weights: dict[str, Any],
        rope: tuple[RopeTable, ...],
        batch: Batch,
        cache: KVCache | None,
        *,
        options: ExecutionOptions = DEFAULT_OPTIONS,
        shards: mesh.Shards | None = None,
        remat: str | None = None,
        dtype: str | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Hidden states before the final norm, and the cache with the new tokens' K and V.

        Args:
            rope: the tables of `ropes`.
            remat: what the backward pass keeps; see nn.layers.
            dtype: of the activations; None is the embedding's.
        """
        num_tokens = batch.num_tokens
        rows = {
            (kind, dim): (
                *rope_rows(table.cos, table.sin, batch.positions),
                None if table.query_scale is None else rows_at(table.query_scale, batch.positions),
            )
            for kind, dim, table in zip(self.ropes, self.rope_dims, rope, strict=True)
        }
        bias = None
        if self.distances:
            longest = min(batch.longest or self.max_position, self.max_position)
            bias = biases(weights["distances"], longest - 1)
        context = Context(options, shards, num_tokens, rows, bias)
        kernels = options.kernels
        tokens, types = batch.tokens, None
        if self.token_types:
            types, tokens = jnp.divmod(tokens, self.vocab_size)
        embed = weights["embed"]
        x = mesh.embed(embed, tokens, shards, dtype=dtype, num_rows=num_tokens, kernels=kernels)
        if self.embed_scale != 1.0:
            x = (x.astype(jnp.float32) * self.embed_scale).astype(x.dtype)
        if self.learned_positions:
            rows_read = batch.positions + self.first_position
            x = x + weights["position"].at[rows_read].get(mode="clip").astype(x.dtype)
        if types is not None:
            x = x + weights["token_type"].at[types].get(mode="clip").astype(x.dtype)
        if self.embed_norm:
            x = context.norm(x, self.embed_norm.of(weights, "embed_norm"))
        per_layer_input = None
        if self.per_layer:
            per_layer_input = self.per_layer.of_tokens(weights, tokens, x, context)
        kinds = {layer: partial(layer, context=context) for layer in self.layers}
        layers = tuple(kinds[layer] for layer in self.layers)
        return run_layers(
            layers,
            weights,
            (x, cache),
            batch,
            groups=self.groups,
            options=options,
            shards=shards,
            remat=remat,
            per_layer_input=per_layer_input,
        )
