"""A mesh of devices: where arrays are split, and what a model's parts exchange.

With a mesh the whole step runs inside one `jax.shard_map`; models then see local shapes and call
the helpers here where the parts meet. `Shards` is passed to them, never ambient; without it the
helpers are the identity. The rules of what is split over what are in `nn.shards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.errors import RequestError
from rooflax.nn.batch import Batch
from rooflax.nn.kv_cache import KVCache
from rooflax.nn.shards import (
    AXES,
    DATA,
    EXPERT,
    SEQUENCE,
    STAGE,
    TENSOR,
    Shards,
    axis_sizes,
    split_axes,
)
from rooflax.nn.weights import LAYER_PREFIX, WeightLine
from rooflax.ops.linear import lookup
from rooflax.ops.weights import Operand, StackMember, as_table, split_leaf, taken


def make_mesh(text: str, axes: tuple[str, ...] = AXES) -> Mesh:
    """The mesh that "tensor=4,data=2" asks for, of the first devices.

    Args:
        axes: all that it has, the outermost first.

    Raises:
        RequestError: it is no mesh, or there are not that many devices.
    """
    sizes, devices = dict.fromkeys(axes, 1) | axis_sizes(text, axes), jax.devices()
    needed = math.prod(sizes.values())
    if needed > len(devices):
        named = [axis for axis in axes if sizes[axis] > 1]
        product = " x ".join(str(sizes[axis]) for axis in named)
        product = f" = {product}" if len(named) > 1 else ""
        more = ""
        if devices[0].platform == "cpu":
            flag = f"--xla_force_host_platform_device_count={needed}"
            more = f" (XLA_FLAGS={flag} simulates them)"
        raise RequestError(
            f"mesh {text} needs {needed}{product} devices, here: {len(devices)}{more}.",
            param="mesh",
        )
    if jax.process_count() > 1 and needed < len(devices):
        raise RequestError(
            f"mesh {text} takes {needed} devices and the processes have {len(devices)} together; "
            f"a mesh of several processes takes all of them.",
            param="mesh",
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=devices[:needed],
    )


@overload
def shards_of(mesh: None) -> None: ...
@overload
def shards_of(mesh: Mesh) -> Shards: ...
def shards_of(mesh: Mesh | None) -> Shards | None:
    """Shards of a mesh.

    Raises:
        RequestError: it has an axis that is none of ours.
    """
    if mesh is None:
        return None
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise RequestError(
            f"The mesh has an axis {unknown[0]!r}; axes are {', '.join(sorted(AXES))}."
        )
    return Shards(**mesh.shape)


def weights_specs(
    table: Mapping[str, WeightLine], weights: Mapping[str, Any], shards: Shards
) -> dict[str, Any]:
    """A tree like `weights` that says where each array is split."""
    lead = (STAGE if shards.stage > 1 else None,)

    def of_layers(layers: tuple[dict[str, Any], ...], lead: tuple) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                key: leaf_spec(table[LAYER_PREFIX + key], leaf, shards, lead)
                for key, leaf in w.items()
            }
            for w in layers
        )

    specs: dict[str, Any] = {}
    for key, leaf in weights.items():
        if key == "layers":
            specs[key] = of_layers(leaf, ())
        elif key == "stacked_layers":
            specs[key] = of_layers(leaf, lead)
        else:
            specs[key] = leaf_spec(table[key], leaf, shards)
    return specs


def leaf_spec(
    line: WeightLine, leaf: Any, shards: Shards, lead: tuple[str | None, ...] = ()
) -> Any:
    """Partition of a weight's array, or of each array of a weight with several.

    Args:
        lead: of the axis of stacked layers.
    """
    return split_leaf(leaf, split_axes(line, shards), line.num_stacked, lead)


def cache_spec(shards: Shards) -> PartitionSpec:
    """KV pools (and their scales): their layers over stages, their heads over tensor."""
    stage, tensor = (axis if getattr(shards, axis) > 1 else None for axis in (STAGE, TENSOR))
    return PartitionSpec(stage, tensor)


def all_reduce(
    x: Float[Array, "*shape"], shards: Shards | None, axes: tuple[str, ...] = (TENSOR,)
) -> Float[Array, "*shape"]:
    """Sums the parts' partial products: after the attention's and the MLP's output projection."""
    names = shards.among(*axes) if shards else ()
    return jax.lax.psum(x, names) if names else x


@overload
def on_one_shard(bias: None, shards: Shards | None) -> None: ...
@overload
def on_one_shard(bias: Array, shards: Shards | None) -> Array: ...
@overload
def on_one_shard(bias: StackMember, shards: Shards | None) -> Array | StackMember: ...
def on_one_shard(
    bias: Float[Array, "*shape"] | StackMember | None, shards: Shards | None
) -> Float[Array, "*shape"] | StackMember | None:
    """Adds x on one tensor shard only: it is whole on the first and zero on the others."""
    if shards is None or shards.tensor == 1 or bias is None:
        return bias
    bias = taken(bias)
    return jnp.where(jax.lax.axis_index(TENSOR) == 0, bias, jnp.zeros_like(bias))


def embed(
    table: Float[Array, "vocab hidden"] | Operand,
    tokens: Int[Array, "rows seq"],
    shards: Shards | None,
    *,
    dtype: str | None = None,
    num_rows: Int[Array, ""] | None = None,
    kernels: str | None = None,
) -> Float[Array, "rows seq hidden"]:
    """Rows of the embedding table, which may be split over the vocabulary.

    Args:
        dtype: of the result; None is the table's.
        num_rows: how many leading tokens are real; None is all.
    """
    if shards is None or shards.tensor == 1:
        rows = lookup(table, tokens, num_rows=num_rows, implementation=kernels)
    else:
        (size,) = as_table(table).out_shape
        local = tokens - jax.lax.axis_index(TENSOR) * size
        mine = (local >= 0) & (local < size)
        rows = lookup(table, jnp.where(mine, local, 0), implementation=kernels)
        rows = jax.lax.psum(jnp.where(mine[..., None], rows, jnp.zeros_like(rows)), TENSOR)
    return rows.astype(dtype or table.dtype)


def gather_vocab(
    logits: Float[Array, "*batch part"], vocab_size: int, shards: Shards | None
) -> Float[Array, "*batch vocab"]:
    """The whole vocabulary's logits from the parts', padding cut off."""
    if shards is not None and shards.tensor > 1:
        logits = jax.lax.all_gather(logits, TENSOR, axis=logits.ndim - 1, tiled=True)
    return logits[..., :vocab_size]


def local_experts(
    expert_ids: Int[Array, "tokens chosen"],
    routing_weights: Float[Array, "tokens chosen"],
    num_local: int,
    shards: Shards | None,
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """The chosen experts by this device's own numbers.

    Another device's expert becomes an own one whose share is zero, so that the sum over the expert
    axis has each chosen expert once.

    Args:
        num_own: experts that this device holds.
    """
    if shards is None or shards.expert == 1:
        return expert_ids, routing_weights
    local = expert_ids - jax.lax.axis_index(EXPERT) * num_local
    mine = (local >= 0) & (local < num_local)
    return jnp.where(mine, local, 0), jnp.where(mine, routing_weights, 0.0)


def local_tokens(batch: Batch, shards: Shards | None) -> Batch:
    """Local shard of the batch: this device's sequences (over data) and their tokens (over
    sequence).

    Of a list, each data shard has the tokens of its own sequences in its own part of the list. What
    does not divide stays whole: then every device runs all of it.
    """
    if shards is None:
        return batch
    if batch.query_starts is not None:
        return _local_list(batch, shards)
    rows, seq = batch.tokens.shape
    if shards.data > 1 and rows % shards.data == 0:
        size = rows // shards.data
        begin = jax.lax.axis_index(DATA) * size
        local = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size), batch)
        batch = replace(local, split=(*local.split, DATA))
    if shards.sequence > 1 and seq % shards.sequence == 0:
        size = seq // shards.sequence
        begin = jax.lax.axis_index(SEQUENCE) * size

        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, begin, size, axis=1)

        batch = replace(
            batch,
            tokens=part(batch.tokens),
            positions=part(batch.positions),
            query_lens=jnp.clip(batch.query_lens - begin, 0, size),
            split=(*batch.split, SEQUENCE),
        )
    return batch


def _local_list(batch: Batch, shards: Shards) -> Batch:
    """`local_tokens` of a list of tokens."""
    num_tokens, num_sequences = batch.tokens.shape[1], len(batch.query_lens)
    if shards.data > 1 and num_tokens % shards.data == 0 and num_sequences % shards.data == 0:
        count = num_sequences // shards.data
        begin = jax.lax.axis_index(DATA) * count
        names = ("query_lens", "context_lens", "query_starts", "query_positions")
        names += ("block_tables", "first_positions")
        fields = {
            name: jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, begin, count), getattr(batch, name)
            )
            for name in names
        }
        batch = _local_tokens_of_list(replace(batch, **fields), DATA, shards.data)
    if shards.sequence > 1 and batch.tokens.shape[1] % shards.sequence == 0:
        batch = _local_tokens_of_list(batch, SEQUENCE, shards.sequence)
    return batch


def _local_tokens_of_list(batch: Batch, axis: str, parts: int) -> Batch:
    """One of equal parts of the list, and of each sequence what is in it."""
    starts, positions = batch.query_starts, batch.query_positions
    assert starts is not None
    assert positions is not None
    size = batch.tokens.shape[1] // parts
    begin = jax.lax.axis_index(axis) * size

    def part(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, begin, size, axis=1)

    first = jnp.clip(starts - begin, 0, size)
    end = jnp.clip(starts + batch.query_lens - begin, 0, size)
    return replace(
        batch,
        tokens=part(batch.tokens),
        positions=part(batch.positions),
        query_lens=end - first,
        query_starts=first,
        query_positions=positions + jnp.maximum(first + begin - starts, 0),
        hidden=None if batch.hidden is None else part(batch.hidden),
        split=(*batch.split, axis),
    )


def gather_tokens(x: Array, batch: Batch, axes: tuple[str, ...] = (DATA, SEQUENCE)) -> Array:
    """[rows, seq, ...] of the batch that `local_tokens` split, from all shards."""
    is_list = batch.query_starts is not None
    for axis, name in ((1, SEQUENCE), (1 if is_list else 0, DATA)):
        if name in batch.split and name in axes:
            x = jax.lax.all_gather(x, name, axis=axis, tiled=True)
    return x


def local_layers(
    x: Float[Array, "layers ..."] | None, shards: Shards | None
) -> Float[Array, "own ..."] | None:
    """Rows of this stage's layers."""
    if x is None or shards is None or shards.stage == 1:
        return x
    size = x.shape[0] // shards.stage
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(STAGE) * size, size)


StageState = tuple[Float[Array, "rows seq hidden"], KVCache | None]


def in_stages(
    run: Callable[..., StageState], x: jax.Array, cache: KVCache | None, shards: Shards
) -> StageState:
    """run(x, cache) by each stage with its own layers, one stage after the other.

    Hidden states go from a stage to the next; the last one's go to all. A stage that is not at its
    turn runs nothing and waits.
    """
    stage, last = jax.lax.axis_index(STAGE), shards.stage - 1
    for turn in range(shards.stage):
        x, cache = jax.lax.cond(stage == turn, run, lambda x, cache: (x, cache), x, cache)
        if turn < last:
            x = jax.lax.ppermute(x, STAGE, [(turn, turn + 1)])
    return jax.lax.psum(jnp.where(stage == last, x, jnp.zeros_like(x)), STAGE), cache
