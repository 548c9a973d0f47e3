"""Tensor parallelism: which axis of a weight is split, and the reductions a model needs.

With a mesh the whole step runs inside one `jax.shard_map`; models then see local shapes and call
the helpers here where the parts meet. `Shards` is passed to them, never ambient; without it the
helpers are the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.errors import RequestError
from rooflax.nn.weights import Slot, Weight
from rooflax.ops.linear import lookup
from rooflax.ops.quantization import QuantizedArray
from rooflax.ops.stacked import Stacked, taken

TENSOR = "tensor"
SPLIT_AXES = ("kv_heads", "heads", "mlp", "vocab")
"""Logical axes that are split over the mesh's tensor axis; every other axis is whole everywhere."""


@dataclass(frozen=True)
class Shards:
    """How many parts the tensor axis has, and its name inside the shard_map."""

    size: int
    axis: str = TENSOR


def check_split(sizes: Mapping[str, int], num_shards: int) -> None:
    """Refuses a split that leaves a remainder, with the arithmetic."""
    for axis in ("kv_heads", "mlp"):
        if axis in sizes and sizes[axis] % num_shards:
            raise RequestError(
                f"{sizes[axis]} {axis} do not divide over {num_shards} devices "
                f"({sizes[axis]} = {num_shards} x {sizes[axis] // num_shards} "
                f"+ {sizes[axis] % num_shards}); choose a mesh whose tensor axis divides them."
            )


class Placer:
    """Puts each weight of a model where a mesh splits it.

    The vocabulary is padded to the split. Where there are more shards than K/V heads, each K/V head
    is copied to as many shards, and its query heads are divided among them.

    Attributes:
        config: the model's, with as many K/V heads as the split needs.

    Raises:
        RequestError: a split that leaves a remainder.
    """

    def __init__(self, config: Any, mesh: Mesh):
        self._mesh, self._shards = mesh, mesh.shape[TENSOR]
        self._copies = _kv_copies(config, self._shards)
        self.config = config
        if self._copies > 1:
            self.config = replace(config, num_kv_heads=self._shards)
        check_split(self.config.axis_sizes, self._shards)

    def __call__(self, slot: Slot, array: np.ndarray) -> jax.Array:
        names = slot.weight.axis_names
        if names[0] == "vocab":
            array = _pad_rows(array, padded_vocab(array.shape[0], self._shards))
        if "qkv_group" in names and self._copies > 1:
            array = _copy_kv_heads(array, self._copies)
        return jax.device_put(array, NamedSharding(self._mesh, weight_spec(slot.weight)))


def _kv_copies(config: Any, num_shards: int) -> int:
    kv_heads = config.num_kv_heads
    fits = num_shards % kv_heads == 0 and config.num_heads % num_shards == 0
    return num_shards // kv_heads if num_shards > kv_heads and fits else 1


def _pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return padded


def _copy_kv_heads(array: np.ndarray, copies: int) -> np.ndarray:
    """[..., K, G + 2, H] to [..., K * copies, G / copies + 2, H], query heads in their order."""
    *lead, kv_heads, group, head_dim = array.shape
    q = array[..., :-2, :].reshape(*lead, kv_heads, copies, (group - 2) // copies, head_dim)
    kv = array[..., None, -2:, :]
    kv = np.broadcast_to(kv, (*lead, kv_heads, copies, 2, head_dim))
    return np.concatenate((q, kv), axis=-2).reshape(*lead, kv_heads * copies, -1, head_dim)


def padded_vocab(vocab_size: int, num_shards: int) -> int:
    """The vocabulary rounded up to a multiple of the number of shards."""
    return math.ceil(vocab_size / num_shards) * num_shards


def weight_spec(weight: Weight) -> PartitionSpec:
    """Where a weight is split: its first axis that is a split axis."""
    names = weight.axis_names
    split = next((name for name in names if name in SPLIT_AXES), None)
    return PartitionSpec(*(TENSOR if name == split else None for name in names))


CACHE_SPEC = PartitionSpec(None, TENSOR)
"""KV pools (and their scales) are split over their heads."""


def tensor_shards(mesh: Mesh | None) -> Shards | None:
    """What models are told of a mesh."""
    return None if mesh is None else Shards(mesh.shape[TENSOR])


def all_reduce(x: Float[Array, "*shape"], shards: Shards | None) -> Float[Array, "*shape"]:
    """Sums the parts' partial products: after the attention's and the MLP's output projection."""
    return x if shards is None else jax.lax.psum(x, shards.axis)


@overload
def once(bias: None, shards: Shards | None) -> None: ...
@overload
def once(bias: Array, shards: Shards | None) -> Array: ...
@overload
def once(bias: Stacked, shards: Shards | None) -> Array | Stacked: ...
def once(
    bias: Float[Array, "*shape"] | Stacked | None, shards: Shards | None
) -> Float[Array, "*shape"] | Stacked | None:
    """A bias that is added before a sum over parts: whole on the first part, zero on the others."""
    if shards is None or bias is None:
        return bias
    bias = taken(bias)
    return jnp.where(jax.lax.axis_index(shards.axis) == 0, bias, jnp.zeros_like(bias))


def embed(
    table: Float[Array, "vocab hidden"] | QuantizedArray,
    tokens: Int[Array, "rows seq"],
    shards: Shards | None,
    *,
    dtype: str | None = None,
    kernels: str | None = None,
) -> Float[Array, "rows seq hidden"]:
    """Rows of the embedding table, which may be split over the vocabulary.

    Args:
        dtype: of the result; None is the table's.
    """
    if shards is None or isinstance(table, QuantizedArray):
        rows = lookup(table, tokens, implementation=kernels)
    else:
        local = tokens - jax.lax.axis_index(shards.axis) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = lookup(table, jnp.where(mine, local, 0), implementation=kernels)
        rows = jax.lax.psum(jnp.where(mine[..., None], rows, jnp.zeros_like(rows)), shards.axis)
    return rows.astype(dtype or table.dtype)


def gather_vocab(
    logits: Float[Array, "*batch part"], vocab_size: int, shards: Shards | None
) -> Float[Array, "*batch vocab"]:
    """The whole vocabulary's logits from the parts', padding cut off."""
    if shards is not None:
        logits = jax.lax.all_gather(logits, shards.axis, axis=logits.ndim - 1, tiled=True)
    return logits[..., :vocab_size]
